"""`generate` reads equal prompts of a batch once, drops rows that have ended, and returns what it did before."""

import random

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GenerationConfig, LogitsProcessorList, SynthIDTextWatermarkingConfig
from transformers.generation import TextStreamer

from tests import tiny
from tests.nightly import daily
from trl_ext.compat import generate
from trl_ext.compat.generate import known_rows_skipped

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
    with known_rows_skipped(model):
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
    with known_rows_skipped(model):
        found = completions(model, ids, torch.ones_like(ids), **settings)
    assert torch.equal(found[0], wanted[0]) and found[1] == wanted[1]


def test_different_prompts_are_read_as_ever():
    model = tiny.model("llama").eval()
    ids = torch.arange(5, 17).reshape(2, 6)
    with known_rows_skipped(model):
        _, read = completions(model, ids, torch.ones_like(ids))
    assert read[0] == 12


def test_prompts_of_a_forward_that_draws_are_read_by_every_completion():
    model = tiny.model("llama").eval()
    model.get_input_embeddings().register_forward_hook(lambda module, inputs, output: output + torch.rand_like(output))
    ids = torch.randint(5, 30, (1, 9)).expand(4, 9)
    wanted, _ = completions(model, ids, torch.ones_like(ids))
    with known_rows_skipped(model):
        found, _ = completions(model, ids, torch.ones_like(ids))
    assert torch.equal(found, wanted)


# Rows that have ended ----------------------------------------------------------------------------------------------

ENDS = [2, *range(10, 30)]  # every tenth token or so


def batch(rows=(0, 0, 0, 1, 1, 1, 2, 3), length=9):
    """Rows of some of four prompts [B, T], of which the second is padded on the left, and their mask."""
    prompts = torch.randint(30, tiny.VOCAB, (4, length), generator=torch.Generator().manual_seed(1))
    ids = prompts[torch.tensor(rows)]
    mask = torch.ones_like(ids)
    padded = torch.tensor(rows) == 1
    ids[padded, :4] = mask[padded, :4] = 0
    return ids, mask


def generated(model, ids, mask, seed=0, others=None, **settings):
    """What `generate` returns, the state of the generator after it, and the rows of each of the model's forwards."""
    rows = []
    hook = model.get_input_embeddings().register_forward_hook(lambda module, inputs, _: rows.append(len(inputs[0])))
    given = dict(max_new_tokens=24, pad_token_id=0, eos_token_id=ENDS, disable_compile=True) | SAMPLED | settings
    torch.manual_seed(seed)
    with torch.no_grad():
        found = model.generate(
            input_ids=ids, attention_mask=mask, generation_config=GenerationConfig(**given), **others or {}
        )
    hook.remove()
    return found, torch.get_rng_state(), rows


def compared(model, ids, mask, **options):
    """Completions of `generate` [B, T], which ours must equal, and the rows of the forwards of either."""
    wanted, state_before, rows_before = generated(model, ids, mask, **options)
    with known_rows_skipped(model):
        found, state, rows = generated(model, ids, mask, **options)
    assert torch.equal(found, wanted) and torch.equal(state, state_before)
    return wanted, rows_before, rows


def check_dropped(completions, ids, rows_before, rows):
    """Fail unless the forwards after the prefill are of the rows that have not ended."""
    ended = torch.isin(completions[:, ids.shape[1] :], torch.tensor(ENDS)).cumsum(1) > 0
    lengths = torch.where(ended.any(1), (~ended).sum(1) + 1, ended.shape[1])
    living = [int((lengths > step).sum()) for step in range(1, int(lengths.max()))]
    assert len(set(living)) > 2, "too few rows end to see anything"
    assert rows_before == [len(ids)] * (1 + len(living))
    assert rows[-len(living) :] == living


SETTINGS = {
    "as TRL samples": {},
    "greedy": dict(do_sample=False, repetition_penalty=1.5),
    "greedy without repeats": dict(do_sample=False, no_repeat_ngram_size=2),
    "top_p": dict(top_p=0.7),
    "top_k": dict(top_k=20, temperature=0.6),
    "min_p": dict(min_p=0.3, temperature=1.4),
    "at least": dict(min_new_tokens=6),
    "suppressed": dict(suppress_tokens=[31, 32], bad_words_ids=[[40, 41]], repetition_penalty=1.2),
    "typical": dict(typical_p=0.8, epsilon_cutoff=1e-4, eta_cutoff=1e-4),
    "one end": dict(eos_token_id=12, min_new_tokens=2, sequence_bias=[[[12], 4.0]]),
    "chunked prefill": dict(prefill_chunk_size=4),
    "guidance": dict(guidance_scale=1.5),
    "prompts penalised": dict(encoder_repetition_penalty=1.3),
    "prompts not repeated": dict(encoder_no_repeat_ngram_size=2),
    "watermark": dict(watermarking_config=SynthIDTextWatermarkingConfig(3, [3, 5, 7])),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("rows", [(0, 0, 0, 1, 1, 1, 2, 3), (0, 1, 2, 3)], ids=["groups", "prompts"])
def test_rows_that_have_ended_are_not_forwarded_and_tokens_stay(name, rows):
    model, (ids, mask) = tiny.model("llama").eval(), batch(rows)
    completions, rows_before, rows_now = compared(model, ids, mask, **SETTINGS[name])
    assert sum(rows_now) < sum(rows_before)
    if name not in ("one end", "chunked prefill", "guidance") and len(rows) == 8:
        check_dropped(completions, ids, rows_before, rows_now)


def test_a_prompt_is_read_in_chunks_where_they_are_asked_for():
    """A chunk's size is a bound on memory; the prompts of a group are then read for each completion."""
    model, (ids, mask) = tiny.model("llama").eval(), batch()
    tokens = []
    model.get_input_embeddings().register_forward_hook(lambda module, inputs, _: tokens.append(inputs[0].shape[1]))
    with known_rows_skipped(model):
        generated(model, ids, mask, prefill_chunk_size=4)
    assert tokens[:4] == [4, 4, 1, 1]


def drawn(seed):
    """Settings and a batch of any kind."""
    draw = random.Random(seed)
    settings = {"do_sample": draw.random() < 0.8, "max_new_tokens": draw.choice([1, 2, 17, 40])}
    some = dict(
        temperature=draw.uniform(0.5, 1.5),
        top_p=draw.uniform(0.3, 1.0),
        top_k=draw.choice([0, 5, 50]),
        min_p=draw.uniform(0.0, 0.3),
        repetition_penalty=draw.uniform(0.8, 1.4),
        no_repeat_ngram_size=draw.choice([0, 2, 3]),
        min_new_tokens=draw.choice([0, 1, 5]),
        eos_token_id=draw.choice([ENDS, ENDS[:8], 2, None]),
    )
    settings |= {name: value for name, value in some.items() if draw.random() < 0.5}
    rows = [draw.randrange(draw.choice([1, 2, 4])) for _ in range(draw.choice([1, 2, 5, 12]))]
    return batch(rows, length=draw.choice([1, 5, 12]) if 1 not in rows else 9), settings


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("seed", daily(list(range(40)), *range(8)))
def test_any_settings_give_the_tokens_and_random_numbers_of_generate(family, seed):
    (ids, mask), settings = drawn(seed)
    compared(tiny.model(family).eval(), ids, mask, seed=seed, **settings)


def test_noise_of_some_rows_is_that_of_multinomial_on_all():
    scores = torch.randn(9, 500)
    for rows in ([0], [8], [1, 4, 5], list(range(9))):
        torch.manual_seed(3)
        wanted, state = torch.multinomial(scores.softmax(-1), 1)[:, 0], torch.get_rng_state()
        torch.manual_seed(3)
        found = generate._next_tokens(scores[rows], torch.tensor(rows), len(scores))
        assert torch.equal(found, wanted[rows]) and torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_scores_that_are_no_numbers_are_refused_as_multinomial_refuses_them(value):
    """All of a row, after another row has ended: the likeliest of such scores would be token 0."""
    scores = torch.randn(3, 7).index_fill(0, torch.tensor([1]), value)
    for rows in ([0, 1, 2], [1, 2]):
        with pytest.raises(RuntimeError, match="probability tensor contains either `inf`, `nan` or element < 0"):
            generate._next_tokens(scores[rows], torch.tensor(rows), len(scores))


@pytest.mark.parametrize("name", ["mistral_window", "gemma3", "bamba", "lfm2"])
def test_models_whose_caches_are_more_than_keys_of_all_tokens_keep_their_rows(name):
    _, rows_before, rows = compared(tiny.model(name).eval(), *batch())
    assert rows == rows_before


UNCHANGED = {
    "static cache": dict(cache_implementation="static"),
    "no cache": dict(use_cache=False),
    "beams": dict(num_beams=2, do_sample=False),
    "sampled beams": dict(num_beams=2),
    "no ends": dict(eos_token_id=None),
}


@pytest.mark.parametrize("name", UNCHANGED)
def test_settings_that_need_the_whole_batch_keep_it(name):
    model = tiny.model("llama").eval()
    _, rows_before, rows = compared(model, *batch((0, 1, 2, 3)), **UNCHANGED[name])
    assert rows == rows_before


def test_more_than_tokens_is_returned_as_ever():
    model, options = tiny.model("llama").eval(), dict(return_dict_in_generate=True, output_scores=True)
    wanted, _, rows_before = generated(model, *batch(), **options)
    with known_rows_skipped(model):
        found, _, rows = generated(model, *batch(), **options)
    assert rows == rows_before
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found.scores, wanted.scores, strict=True))


class Heard(TextStreamer):
    """Notes what it gets."""

    def __init__(self):
        self.tokens = []

    def put(self, value):
        self.tokens.append(value.tolist())

    def end(self):
        self.tokens.append(None)


def own_loop(model, input_ids, **_):
    return input_ids + 1


GIVEN = {
    "a streamer": lambda model: dict(streamer=Heard()),
    "an assistant": lambda model: dict(assistant_model=model),
    "a loop": lambda model: dict(custom_generate=own_loop),
    "types of tokens": lambda model: dict(logits_processor=LogitsProcessorList()),
}


@pytest.mark.parametrize("name", GIVEN)
def test_what_the_caller_gives_besides_tokens_reaches_generate(name):
    model, (ids, mask) = tiny.model("llama").eval(), batch((0,))
    given = GIVEN[name](model)
    _, rows_before, rows = compared(model, ids, mask, others=given)
    assert rows == rows_before
    if "streamer" in given:
        half = len(given["streamer"].tokens) // 2
        assert half > 2 and given["streamer"].tokens[:half] == given["streamer"].tokens[half:]


@pytest.mark.parametrize("setting", [dict(prompt_lookup_num_tokens=2), dict(penalty_alpha=0.6, top_k=4)], ids=str)
def test_ways_of_decoding_of_generation_config_json_are_heeded(setting):
    model = tiny.model("llama").eval()
    model.generation_config.update(**setting)
    settings = dict(do_sample=None) | dict.fromkeys(("top_k", "top_p", "temperature"))
    sampling, given = (
        generate._with_defaults(GenerationConfig(**one), model.generation_config)
        for one in (dict(do_sample=True), settings)
    )
    assert generate._is_plain(sampling) == ("top_k" in setting) and not generate._is_plain(given)


@pytest.mark.parametrize("rows", [(0, 0, 1, 1), (0, 1, 2, 3)], ids=["groups", "prompts"])
def test_forwards_that_draw_random_numbers_are_of_all_rows(rows):
    model = get_peft_model(tiny.model("llama"), LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.3)).train()
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.data.normal_()
    _, rows_before, rows_now = compared(model, *batch(rows))
    assert rows_now[-len(rows_before) :] == rows_before


def test_rows_of_an_adapted_model_are_dropped():
    model = get_peft_model(tiny.model("llama"), LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.3)).eval()
    ids, mask = batch()
    check_dropped(*(found := compared(model, ids, mask))[:1], ids, *found[1:])
    assert "generate" not in vars(model) and "forward" not in vars(model.get_base_model())
