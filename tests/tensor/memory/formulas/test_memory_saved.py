"""What a layer saves for its backward, in the real model, is what the formula says."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import CONFIG_MAPPING, AutoModel

from tests.twin.tracker import Tracker
from trl_ext.memory.formulas.activations import checkpoint_bytes, no_grad_bytes, saved_bytes, work_bytes
from trl_ext.memory.job import Job
from trl_ext.memory.models.families import FAMILIES, shape_from_config

SIZES = dict(vocab_size=32, hidden_size=256, intermediate_size=640, num_attention_heads=8, num_key_value_heads=2)
SIZES |= dict(head_dim=32, pad_token_id=0, bos_token_id=1, eos_token_id=2)
MIXTURE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


def mixture_of(family):
    """Return the sizes of a mixture; nothing for a family of dense models or without a formula."""
    return MIXTURE if family in FAMILIES and FAMILIES[family].is_mixture else {}


def make(family, num_layers, attention, dtype, **changes):
    """A model of the family, with few layers."""
    mixture = mixture_of(family)
    config = CONFIG_MAPPING[family](**SIZES, **mixture, **changes, num_hidden_layers=num_layers)
    torch.manual_seed(0)
    model = AutoModel.from_config(config, dtype=dtype, attn_implementation=attention).train()
    if mixture:
        model.set_experts_implementation("grouped_mm")  # the implementation on GPUs
    return model


def saved_by_layers(family, num_layers, num_tokens, attention="sdpa", dtype=torch.bfloat16, **changes):
    """Bytes that the graph of a bf16 forward holds, parameters left out; float32 weights go under autocast."""
    model = make(family, num_layers, attention, dtype, **changes)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    held, alive = {}, []

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            held[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)  # so that no later tensor gets the same address
        return tensor

    autocast = torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), autocast:
        model(input_ids=torch.ones(1, num_tokens, dtype=torch.long), use_cache=False)
    return sum(held.values())


def saved_per_token_and_layer(family, **changes):
    """The slope over layers and tokens: what does not grow with both drops out."""
    pairs = [(num_layers, num_tokens) for num_layers in (1, 2) for num_tokens in (64, 128)]
    counts = {pair: saved_by_layers(family, *pair, **changes) for pair in pairs}
    return (counts[2, 128] - counts[1, 128] - counts[2, 64] + counts[1, 64]) / 64


def shape_of(family):
    return shape_from_config({"model_type": family, **SIZES, **mixture_of(family), "num_hidden_layers": 2})


def formula(family):
    return saved_bytes(shape_of(family), Job("grpo", zero_stage=2))


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


# Gemma 4 has no formula and takes the formula of Gemma 3. Here layers with a window and other layers have heads of the
# same width, and no layer takes the keys of another layer or its own embedding of the tokens.
GEMMA4 = dict(global_head_dim=32, num_kv_shared_layers=0, hidden_size_per_layer_input=0)
WITHOUT_FORMULA = {"gemma4_text": GEMMA4, "gemma4_unified_text": dict(global_head_dim=32)}


@pytest.mark.parametrize("family", WITHOUT_FORMULA)
def test_the_formula_of_the_nearest_family_is_close(family):
    changes = WITHOUT_FORMULA[family]
    shape = shape_from_config(CONFIG_MAPPING[family](**SIZES, **changes, num_hidden_layers=2).to_dict())
    found = saved_bytes(shape, Job("grpo", zero_stage=2))
    assert found == pytest.approx(saved_per_token_and_layer(family, **changes), rel=0.06)


# Families that load with eager attention, which saves T x T matrices ------------------------------------------------

EAGER = [family for family in FAMILIES if FAMILIES[family].is_eager]
WEIGHTS = {torch.bfloat16: {"zero_stage": 2}, torch.float32: {"dtype": "float32"}}  # as in a job


def eager_job(num_tokens, dtype=torch.bfloat16):
    """A padded job with sequences of `num_tokens`."""
    half = num_tokens // 2
    return Job("grpo", packing=False, max_prompt_length=half, max_completion_length=half, **WEIGHTS[dtype])


def counted(family, num_tokens, dtype):
    """Bytes that one layer saves."""
    two, three = (saved_by_layers(family, num_layers, num_tokens, "eager", dtype) for num_layers in (2, 3))
    return three - two


def by_formula(family, num_tokens, dtype):
    return saved_bytes(shape_of(family), eager_job(num_tokens, dtype)) * num_tokens


def test_the_families_marked_as_eager_are_those_that_transformers_loads_with_eager_attention(subtests):
    for family in FAMILIES:
        with subtests.test(family):
            model = AutoModel.from_config(CONFIG_MAPPING[family](**SIZES, **MIXTURE, num_hidden_layers=1))
            assert (model.config._attn_implementation == "eager") is FAMILIES[family].is_eager


@pytest.mark.parametrize("family", EAGER)
def test_a_layer_with_eager_attention_saves_what_the_formula_gives(family, subtests):
    for num_tokens in (256, 512, 1024):
        with subtests.test(num_tokens):
            found = by_formula(family, num_tokens, torch.bfloat16)
            assert found == pytest.approx(counted(family, num_tokens, torch.bfloat16), rel=0.002)


@pytest.mark.parametrize("dtype", WEIGHTS)
@pytest.mark.parametrize("family", EAGER)
def test_the_square_of_the_tokens_counts_as_in_the_layer(family, dtype):
    # A constant, such as cast weights, and what is linear in the tokens drop out.
    saved, found = (
        of(family, 768, dtype) - 2 * of(family, 512, dtype) + of(family, 256, dtype) for of in (counted, by_formula)
    )
    assert found == pytest.approx(saved, rel=0.001)


@pytest.mark.parametrize("dtype", WEIGHTS)
@pytest.mark.parametrize("family", EAGER)
def test_a_layer_works_with_as_many_bytes_as_counted(family, dtype):
    num_tokens = 4096
    scored, recomputed = peaks(family, num_tokens, dtype)
    shape, job = shape_of(family), eager_job(num_tokens, dtype)
    assert num_tokens * no_grad_bytes(shape, job, num_tokens) == pytest.approx(scored, rel=0.02)
    held = shape.num_layers * checkpoint_bytes(shape, job)
    assert num_tokens * (held + work_bytes(shape, job)) == pytest.approx(recomputed, rel=0.02)


def peaks(family, num_tokens, dtype):
    """Peaks of a forward without gradients, and of a backward with checkpoints, on fake tensors, weights left out."""
    ids, positions = torch.ones(1, num_tokens, dtype=torch.long), torch.arange(num_tokens)[None]
    with FakeTensorMode(allow_non_fake_inputs=True), Tracker() as tracker:
        model = make(family, 2, "eager", dtype)
        for layer in model.layers if FAMILIES[family].is_mixture and dtype is torch.float32 else ():
            layer.mlp.forward = lambda hidden: (hidden, None)  # fake tensors have no grouped_mm in float32
        weights = tracker.live
        call = {
            "input_ids": ids,
            "position_ids": positions,
            "attention_mask": torch.ones_like(ids),
            "use_cache": False,
        }
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.float32):
            with torch.no_grad(), tracker.phase("score"):
                model(**call)
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            hidden = model(**call).last_hidden_state
        with tracker.phase("backward"):
            hidden.sum().backward()
    return tuple(tracker.peaks[name].num_bytes - weights for name in ("score", "backward"))
