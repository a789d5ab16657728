"""What a layer saves for its backward, in the real model, is what the formula says."""

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModel

from trl_ext.memory.formulas.activations import saved_bytes
from trl_ext.memory.job import Job
from trl_ext.memory.models.families import FAMILIES, shape_from_config

SIZES = dict(vocab_size=32, hidden_size=256, intermediate_size=640, num_attention_heads=8, num_key_value_heads=2)
SIZES |= dict(head_dim=32, pad_token_id=0, bos_token_id=1, eos_token_id=2)
MIXTURE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


def saved_by_layers(family, num_layers, num_tokens):
    """Bytes that the graph of a bf16 forward holds, parameters left out."""
    mixture = MIXTURE if FAMILIES[family].is_mixture else {}
    config = CONFIG_MAPPING[family](**SIZES, **mixture, num_hidden_layers=num_layers)
    torch.manual_seed(0)
    model = AutoModel.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").train()
    if mixture:
        model.set_experts_implementation("grouped_mm")  # the implementation on GPUs
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    held, alive = {}, []

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            held[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)  # so that no later tensor gets the same address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model(input_ids=torch.ones(1, num_tokens, dtype=torch.long), use_cache=False)
    return sum(held.values())


def saved_per_token_and_layer(family):
    """The slope over layers and tokens: what does not grow with both drops out."""
    counts = {(layers, tokens): saved_by_layers(family, layers, tokens) for layers in (1, 2) for tokens in (64, 128)}
    return (counts[2, 128] - counts[1, 128] - counts[2, 64] + counts[1, 64]) / 64


def formula(family):
    mixture = MIXTURE if FAMILIES[family].is_mixture else {}
    shape = shape_from_config({"model_type": family, **SIZES, **mixture, "num_hidden_layers": 2})
    return saved_bytes(shape, Job("grpo", zero_stage=2))


# Phi-3 keeps its fused projection where attention is not the packed kernel; the twin holds its formula.
@pytest.mark.parametrize(
    ("families", "within"),
    [
        (("llama", "mistral", "qwen2", "qwen3", "smollm3", "gemma"), 1e-3),
        (("qwen2_moe", "qwen3_moe", "mixtral", "gemma3_text", "olmo2", "granite"), 0.06),
    ],
)
def test_the_formula_is_exact_or_close(families, within, subtests):
    for family in families:
        with subtests.test(family):
            assert formula(family) == pytest.approx(saved_per_token_and_layer(family), rel=within)
