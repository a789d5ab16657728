"""A model whose layers carry state, packed with shared prompts on two processes: what one trains on padded rows."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from tests import tiny
from tests.multi.conftest import HIDDEN_SIZE
from tests.multi.launching import run_job, skip_what_cannot_run
from tests.nightly import nightly

TOLERANCE = 1e-5  # a recurrence rounds by the sizes of its chunks


@pytest.fixture(scope="session")
def hybrid(tiny_model, tmp_path_factory):
    """A folder with a random Qwen3.5 of two delta nets, and the tiny Llama's tokenizer."""
    folder = tmp_path_factory.mktemp("hybrid")
    PreTrainedTokenizerFast.from_pretrained(tiny_model).save_pretrained(folder)
    family, own = tiny.STATEFUL["qwen3_5"]
    layers = ["linear_attention", "full_attention", "linear_attention"]
    sizes = dict(vocab_size=AutoConfig.from_pretrained(tiny_model).vocab_size, hidden_size=HIDDEN_SIZE)
    # As for the Llama: ZeRO-3 leaves small matrices whole.
    sizes |= dict(intermediate_size=2048, initializer_range=0.1, num_attention_heads=4, num_key_value_heads=2)
    special = dict(pad_token_id=0, eos_token_id=1, bos_token_id=2)
    own = {
        **own,
        **sizes,
        **special,
        "head_dim": 16,
        "layer_types": layers,
        "num_hidden_layers": 3,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **own)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def alone(hybrid, tmp_path_factory):
    """One process, no launcher, padded batches."""
    return run_job("grpo", None, tmp_path_factory.mktemp("alone"), model=hybrid)


@pytest.mark.parametrize("name", [nightly("cpu"), nightly("zero2"), "zero3"])
def test_two_processes_train_what_one_does(name, alone, hybrid, tmp_path):
    skip_what_cannot_run(name)
    run = run_job("grpo", name, tmp_path, model=hybrid, packing=True)
    # Under ZeRO-3 transformers saves the text model by its names inside the multimodal one.
    run.weights.update({name.replace("language_model.", ""): run.weights.pop(name) for name in [*run.weights]})
    print(f"largest weight difference: {run.distance(alone):.1e}")  # pytest -rP shows it
    assert run.facts["world_size"] == 2
    assert (run.facts["num_split_parameters"] > 0) == (name == "zero3")
    assert min(run.facts["padded_over_forwarded"]) > 1
    assert run.distance(alone) <= TOLERANCE
