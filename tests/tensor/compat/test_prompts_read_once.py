"""Equal prompts of a batch are read once by `generate`, and the completions stay what they were."""

import pytest
import torch
from transformers import GenerationConfig

from tests import tiny
from trl_ext.compat.transformers import prompts_read_once

SAMPLED = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}


def completions(model, ids, mask, **settings):
    """[B, T]; and the tokens of each call of the model."""
    read = []
    hook = model.get_input_embeddings().register_forward_hook(lambda module, inputs, _: read.append(inputs[0].numel()))
    config = GenerationConfig(
        max_new_tokens=6, pad_token_id=0, eos_token_id=None, disable_compile=True, **SAMPLED, **settings
    )
    torch.manual_seed(0)
    with torch.no_grad():
        found = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
    hook.remove()
    return found, read


# Read at once: the prompts but their last token where keys and values of all tokens are cached, else every row.
@pytest.mark.parametrize(
    ("name", "shares"), [("llama", True), ("qwen3_moe", True), ("gemma3", False), ("bamba", False), ("lfm2", False)]
)
def test_equal_prompts_are_read_once_where_a_cache_holds_all_tokens(name, shares):
    model = tiny.model(name).eval()
    prompts = torch.randint(5, 30, (3, 9))
    ids = prompts[torch.tensor([0, 0, 0, 1, 1, 1, 2, 2])]
    mask = torch.ones_like(ids)
    ids[3:6, :4] = mask[3:6, :4] = 0  # padded on the left
    wanted, read_before = completions(model, ids, mask)
    with prompts_read_once(model):
        found, read = completions(model, ids, mask)
    assert torch.equal(found, wanted) and read_before[0] == 8 * 9
    assert read == ([3 * 8, 8, *read_before[1:]] if shares else read_before)
    assert "generate" not in vars(model)


@pytest.mark.parametrize("where", ["generation_kwargs", "generation_config.json"])
@pytest.mark.parametrize(
    "setting",
    [{"cache_implementation": "static"}, {"use_cache": False}, {"num_beams": 2}],
    ids=lambda it: next(iter(it)),
)
def test_settings_that_choose_a_cache_get_it(setting, where):
    model = tiny.model("llama").eval()
    ids = torch.randint(5, 30, (1, 9)).expand(4, 9)
    settings = setting if where == "generation_kwargs" else {}
    if not settings:
        model.generation_config.update(**setting)
    wanted = completions(model, ids, torch.ones_like(ids), **settings)
    with prompts_read_once(model):
        found = completions(model, ids, torch.ones_like(ids), **settings)
    assert torch.equal(found[0], wanted[0]) and found[1] == wanted[1]


def test_different_prompts_are_read_as_ever():
    model = tiny.model("llama").eval()
    ids = torch.arange(5, 17).reshape(2, 6)
    with prompts_read_once(model):
        _, read = completions(model, ids, torch.ones_like(ids))
    assert read[0] == 12


def test_prompts_of_a_forward_that_draws_are_read_by_every_completion():
    model = tiny.model("llama").eval()
    model.get_input_embeddings().register_forward_hook(lambda module, inputs, output: output + torch.rand_like(output))
    ids = torch.randint(5, 30, (1, 9)).expand(4, 9)
    wanted, _ = completions(model, ids, torch.ones_like(ids))
    with prompts_read_once(model):
        found, _ = completions(model, ids, torch.ones_like(ids))
    assert torch.equal(found, wanted)
