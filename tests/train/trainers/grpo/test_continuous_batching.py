"""Continuous batching reads the prompt of a group once, and every row gets what TRL's own would have got."""

import gc
from inspect import signature
from types import SimpleNamespace

import pytest
import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from transformers.generation import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache

import trl_ext
from tests import grpo_trainers, ppo_trainers, tiny

# By default the cache takes half of the memory that is free, and filling that takes a minute.
PAGE = "page_size" if "page_size" in signature(ContinuousBatchingConfig).parameters else "block_size"
SMALL_CACHE = {"num_blocks": 128, "max_batch_tokens": 256, PAGE: 8}
CONTINUOUS = dict(
    use_transformers_continuous_batching=True, transformers_continuous_batching_config=SMALL_CACHE, rollout_func=None
)
SETTINGS = dict(max_steps=1, shuffle_dataset=False, top_k=1, gradient_accumulation_steps=1) | CONTINUOUS


def prompts(*lengths):
    """Prompts of these lengths; equal lengths are equal prompts."""
    rows = [tiny.words(*(5 + (length * 7 + i * 3) % 180 for i in range(length))) for length in lengths]
    return Dataset.from_dict({"prompt": rows})


def watched(model):
    """Watch a model's `generate_batch`: batches of rows, each a prompt and a completion; tokens through the model."""
    seen = SimpleNamespace(batches=[], tokens=0, outputs=[])
    generate_batch, running = model.generate_batch, []

    def count(module, inputs, _):
        seen.tokens += inputs[0].numel() if running else 0

    def watching(inputs, **options):
        running.append(True)
        found = list(generate_batch(inputs, **options).values())
        running.clear()
        seen.batches.append([(tuple(a), tuple(b.generated_tokens)) for a, b in zip(inputs, found, strict=True)])
        seen.outputs += found
        return dict(enumerate(found))

    model.get_input_embeddings().register_forward_hook(count)
    model.generate_batch = watching
    return seen


def generated(folder, library=trl_ext, family="llama", **changes):
    """What a training by GRPO generates."""
    model = tiny.model(family)
    seen = watched(model)
    settings = SETTINGS | dict(max_completion_length=6) | changes
    seen.trainer = grpo_trainers.trainer(folder, library, model, **settings)
    seen.trainer.train()
    return seen


def read_once(seen):
    """Tokens through the model if each batch reads each of its prompts once."""
    before = sum(len(ids) - 1 for batch in seen.batches for ids in {ids for ids, _ in batch})
    return before + sum(len(completion) for batch in seen.batches for _, completion in batch)


def read_by_each(seen):
    """Tokens through the model if each row reads its prompt."""
    return sum(len(ids) - 1 + len(completion) for batch in seen.batches for ids, completion in batch)


CASES = {
    "groups of four": (dict(per_device_train_batch_size=12), (14, 10, 20)),
    "a prompt twice, side by side and apart": (dict(per_device_train_batch_size=16), (14, 14, 10, 14)),
    "prompts of one token, and of a token after whole pages": (dict(per_device_train_batch_size=12), (1, 17, 16)),
    "common beginnings": (dict(per_device_train_batch_size=12), (24, 25, 40)),
    "a cache for a part": (
        dict(per_device_train_batch_size=12, transformers_continuous_batching_config=SMALL_CACHE | {"num_blocks": 7}),
        (20, 21, 22),
    ),
    "two updates": (dict(per_device_train_batch_size=8, max_steps=2), (14, 10, 20, 11)),
}


@pytest.mark.parametrize(("changes", "lengths"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_greedy_rows_are_trls(family, changes, lengths, tmp_path):
    ours, theirs = (
        generated(tmp_path, library, family, data=prompts(*lengths), **changes) for library in (trl_ext, trl)
    )
    assert ours.batches == theirs.batches and len({row for batch in ours.batches for row in batch}) > 1


def test_the_prompt_of_a_group_is_read_once(tmp_path):
    options = dict(data=prompts(14, 10, 20, 14), per_device_train_batch_size=16)
    ours, theirs = (generated(tmp_path, library, **options) for library in (trl_ext, trl))
    assert ours.tokens == read_once(ours) < theirs.tokens == read_by_each(theirs)
    unpacked = generated(tmp_path, packing=False, **options)
    assert unpacked.tokens == theirs.tokens and unpacked.batches == theirs.batches


def test_an_adapter_generates_as_trls(tmp_path):
    options = dict(data=prompts(14, 10), per_device_train_batch_size=8, max_steps=2)
    ours, theirs = (
        generated(tmp_path, library, peft_config=LoraConfig(r=4, target_modules="all-linear"), **options)
        for library in (trl_ext, trl)
    )
    assert ours.batches == theirs.batches and ours.tokens == read_once(ours) < theirs.tokens


@pytest.mark.parametrize("start", [2, 3])
def test_rows_that_begin_and_end_within_a_group_are_trls(start, tmp_path):
    """As on the second of two processes whose rows are not whole groups."""

    def of_part(library):
        seen = generated(tmp_path, library, data=prompts(14, 10, 20), per_device_train_batch_size=12)
        texts = [text for text in seen.trainer.train_dataset["prompt"] for _ in range(4)]
        seen.trainer._generate(texts[start : start + 7])
        return seen.batches[-1]

    ours, theirs = of_part(trl_ext), of_part(trl)
    assert ours == theirs and len(ours) == 7


def test_an_evaluation_with_other_group_sizes_gets_trls_rows_and_stays_an_evaluation(tmp_path):
    """TRL leaves the model in training mode, with the group size and metrics of training from the 2nd batch on."""
    options = dict(data=prompts(14, 10), per_device_train_batch_size=8, eval_dataset=prompts(11, 12, 13, 15))
    options |= dict(num_generations_eval=2, per_device_eval_batch_size=4)

    def evaluated(library):
        seen = generated(tmp_path, library, **options)
        seen.batches.clear()
        seen.tokens = 0
        return seen, seen.trainer.evaluate()

    (ours, metrics), (theirs, _) = evaluated(trl_ext), evaluated(trl)
    assert ours.batches == theirs.batches and list(map(len, ours.batches)) == [4, 4]
    assert ours.tokens == read_once(ours) < theirs.tokens
    rewards = grpo_trainers.reward([completion for batch in ours.batches for _, completion in batch])
    assert metrics["eval_reward"] == pytest.approx(sum(rewards) / len(rewards))
    assert not ours.trainer._metrics["train"]
    assert all(not module.training for module in ours.trainer.model.modules())


@pytest.mark.parametrize("critic", ["head", "none"])
def test_ppo_generates_the_rows_of_unforked_prompts(critic, tmp_path):
    def trained(packing):
        model = ppo_trainers.actor()
        seen = watched(model)
        settings = dict(model=model, data=prompts(14, 10, 20), response_length=6, packing=packing, max_steps=2)
        settings |= dict(per_device_train_batch_size=6, gradient_accumulation_steps=2, num_generations=4)
        if critic == "none":
            settings |= dict(advantage_estimator="rloo")
        options = SETTINGS | settings
        ppo_trainers.trainer(critic, tmp_path, **options).train()
        return seen

    ours, plain = trained(packing=True), trained(packing=False)
    assert ours.batches == plain.batches and ours.tokens == read_once(ours) < plain.tokens == read_by_each(plain)


def test_the_cache_is_gone_when_the_completions_are_scored(tmp_path):
    alive = []

    def reward(completion_ids, **_):
        alive.append([type(one).__name__ for one in gc.get_objects() if isinstance(one, PagedAttentionCache)])
        return grpo_trainers.reward(completion_ids)

    generated(tmp_path, rewards=reward, data=prompts(14, 10), per_device_train_batch_size=8, max_steps=2)
    assert alive == [[], []]


TEMPERATURE = 0.7


def sampled(folder, library=trl_ext, **changes):
    """A training on sampled completions, with the sampler's log-probabilities, of a model that can say something."""
    model = ppo_trainers.decided_actor()
    seen = watched(model)
    engine = SMALL_CACHE | dict(num_blocks=512, return_logprobs=True)
    settings = SETTINGS | dict(top_k=0, temperature=TEMPERATURE, transformers_continuous_batching_config=engine)
    settings |= dict(learning_rate=0.0, num_generations=64, per_device_train_batch_size=128, max_completion_length=6)
    grpo_trainers.trainer(folder, library, model, **settings | dict(data=prompts(14, 10)) | changes).train()
    return model.eval(), seen


def padded_logps(model, batch):
    """Log-probabilities of each row's completion, and of all first tokens, by a padded forward."""
    length = max(len(ids) + len(completion) for ids, completion in batch)
    tokens = torch.tensor([[0] * (length - len(a) - len(b)) + [*a, *b] for a, b in batch])
    mask = torch.tensor([[0] * (length - len(a) - len(b)) + [1] * (len(a) + len(b)) for a, b in batch])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(input_ids=tokens, attention_mask=mask, position_ids=positions).logits
    logps = (logits / TEMPERATURE).log_softmax(-1)[:, :-1]
    found = logps.gather(2, tokens[:, 1:, None]).squeeze(2)
    first = [logps[i, -len(completion)] for i, (_, completion) in enumerate(batch)]
    return [found[i, -len(completion) :] for i, (_, completion) in enumerate(batch)], first


def test_what_is_sampled_has_the_probability_that_a_padded_forward_gives_it(tmp_path):
    model, seen = sampled(tmp_path)
    [batch] = seen.batches
    for given, found in zip(padded_logps(model, batch)[0], seen.outputs, strict=True):
        assert (given - torch.tensor(found.logprobs)).abs().max() <= 2e-5
    for prompt in {ids for ids, _ in batch}:
        assert len({completion for ids, completion in batch if ids == prompt}) > 32


def test_first_tokens_are_drawn_as_often_as_they_are_likely(tmp_path):
    """The statistic of Pearson's test, over tokens that 512 draws should give at least 5 times."""
    model, seen = sampled(tmp_path, num_generations=512, per_device_train_batch_size=512, data=prompts(14))
    [batch] = seen.batches
    expected = 512 * padded_logps(model, batch[:1])[1][0].exp()
    drawn = torch.bincount(torch.tensor([completion[0] for _, completion in batch]), minlength=len(expected))
    common = expected >= 5
    counts = torch.cat([drawn[common], drawn[~common].sum()[None]])
    wanted = torch.cat([expected[common], expected[~common].sum()[None]])
    statistic, freedom = ((counts - wanted) ** 2 / wanted).sum(), len(wanted) - 1
    assert freedom >= 10 and statistic < freedom + 4 * (2 * freedom) ** 0.5
