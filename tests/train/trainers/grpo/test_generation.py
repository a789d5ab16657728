"""Completions of `generate` are TRL's, though a prompt is read once and rows that have ended are dropped."""

from contextlib import nullcontext

import pytest
import torch
import trl
from datasets import Dataset
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import set_seed

import trl_ext
from tests import grpo_trainers, ppo_trainers, tiny, tool_task
from trl_ext.trainers.fit.rehearsal.state import random_numbers_restored
from trl_ext.trainers.generation import sampling

ENDS = list(range(10, 30))  # every tenth token or so


def model(family="llama", **changes):
    made = tiny.model(family, **changes)
    made.generation_config.eos_token_id = ENDS
    return made


def watched(subject):
    """The rows of each of its forwards in generation."""
    rows, generate = [], subject._generate

    def noting(*args):
        embedding = subject.model.get_input_embeddings()
        hook = embedding.register_forward_hook(lambda module, inputs, _: rows.append(inputs[0].numel()))
        try:
            return generate(*args)
        finally:
            hook.remove()

    subject._generate = noting
    return rows


def run(library, folder, policy=None, trainer=grpo_trainers.trainer, **changes):
    """Prompts with completions of all batches, also of evaluations, and the tokens that generation forwarded."""
    seen = []

    def reward(prompts, completion_ids, **_):
        seen.append([(text, list(ids)) for text, ids in zip(prompts, completion_ids, strict=True)])
        return grpo_trainers.reward(completion_ids)

    settings = dict(rollout_func=None, max_completion_length=24, per_device_train_batch_size=8)
    set_seed(3)
    subject = trainer(
        folder, library, rewards=reward, **settings | dict(model=model() if policy is None else policy) | changes
    )
    subject.evaluate = random_numbers_restored()(subject.evaluate)  # TRL's evaluation moves training's random numbers
    rows = watched(subject)
    subject.train()
    return seen, sum(rows)


class Casts(TorchDispatchMode):
    """Counts casts of a model's weights."""

    def __init__(self, subject):
        super().__init__()
        self._weights = {parameter.data_ptr() for parameter in subject.model.parameters()}
        self.number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.number += function is torch.ops.aten._to_copy.default and args[0].data_ptr() in self._weights
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("packing", [False, True])
def test_weights_are_cast_once_for_all_tokens(packing, tmp_path):
    made, most = {}, {}
    for library, own in ((trl, {}), (trl_ext, {"packing": packing})):
        numbers, seen = [], []

        def reward(completion_ids, seen=seen, **_):
            seen.extend(map(list, completion_ids))
            return grpo_trainers.reward(completion_ids)

        settings = dict(rollout_func=None, max_completion_length=12, per_device_train_batch_size=8, bf16=True)
        set_seed(3)
        subject = grpo_trainers.trainer(
            tmp_path, library, rewards=reward, model=model(), max_steps=2, **settings, **own
        )
        generate = subject._generate

        def counted(*args, subject=subject, generate=generate, numbers=numbers):
            with Casts(subject) as casts:
                found = generate(*args)
            numbers.append(casts.number)
            return found

        subject._generate = counted
        subject.train()
        made[library], most[library] = seen, max(numbers)
    weights = sum(parameter.dim() > 1 for parameter in model().parameters())
    assert most[trl] > 3 * weights and most[trl_ext] <= weights
    assert packing or made[trl_ext] == made[trl]


SETTINGS = {
    "as TRL samples": {},
    "several batches, groups of two": dict(
        num_generations=2, gradient_accumulation_steps=2, steps_per_generation=4, max_steps=4
    ),
    "top_p, top_k, min_p": dict(top_p=0.8, top_k=40, min_p=0.02, temperature=0.8),
    "repetition_penalty": dict(repetition_penalty=1.3),
    "generation_kwargs": dict(generation_kwargs=dict(no_repeat_ngram_size=2, min_new_tokens=5)),
    "checkpointing": dict(gradient_checkpointing=True),
    "evaluations": dict(eval_strategy="steps", eval_steps=1, eval_dataset=grpo_trainers.prompts().select(range(3))),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_completions_of_a_run_are_trls(name, tmp_path):
    theirs, theirs_forwarded = run(trl, tmp_path, **SETTINGS[name])
    ours, forwarded = run(trl_ext, tmp_path, packing=True, **SETTINGS[name])
    assert ours == theirs and len(ours) >= 2
    assert forwarded < 0.8 * theirs_forwarded


@pytest.mark.parametrize("family", tiny.STRETCHED)
def test_positions_that_depend_on_the_longest_row_are_trls(family, tmp_path):
    """A row that is dropped, or a prompt without its last token, would give the others different frequencies."""
    long = Dataset.from_dict({"prompt": [tiny.words(*range(30, 30 + length)) for length in (46, 12, 46, 12) * 2]})

    def policy():
        made = model(family)
        for name, weight in made.named_parameters():
            if name.endswith("_proj.weight"):  # attention that depends on positions
                weight.data *= 10
        return made

    given = dict(data=long, max_completion_length=40, max_steps=1)  # updates are different on purpose
    ours, forwarded = run(trl_ext, tmp_path, policy(), packing=True, **given)
    theirs, theirs_forwarded = run(trl, tmp_path, policy(), **given)
    assert ours == theirs and forwarded == theirs_forwarded


@pytest.mark.parametrize(
    "changes",
    [{}, dict(num_generations=1, eval_temperature=0.0), dict(critic="none", advantage_estimator="rloo")],
    ids=str,
)
def test_completions_of_ppo_are_those_of_plain_generation(changes, tmp_path, monkeypatch):
    def completions(folder):
        seen = []

        def reward(completion_ids, **_):
            seen.append([list(ids) for ids in completion_ids])
            return ppo_trainers.reward(completion_ids)

        settings = dict(rollout_func=None, response_length=24, model=model(), reward_funcs=reward, num_generations=4)
        settings |= dict(critic="head") | changes
        set_seed(3)
        subject = ppo_trainers.trainer(settings.pop("critic"), folder, **settings)
        rows = watched(subject)
        subject.train()
        return seen, sum(rows)

    ours, forwarded = completions(tmp_path / "ours")
    monkeypatch.setattr(sampling, "_generates_whole", lambda trainer: False)
    plain, plain_forwarded = completions(tmp_path / "plain")
    assert ours == plain and len(ours) >= 3
    assert forwarded < 0.8 * plain_forwarded


def test_turns_with_tools_are_trls(tmp_path):
    def run(library, **changes):
        seen = []

        def reward(completion_ids, **_):
            seen.append([list(ids) for ids in completion_ids])
            return [(sum(ids) % 17) / 17 for ids in completion_ids]

        set_seed(3)
        subject = tool_task.trainer(library, tmp_path, reward, **changes)
        scripted, turns = subject._generate_single_turn, []

        def first_scripted(*given, **options):
            turns.append(len(given[0]))
            generate = type(subject)._generate_single_turn.__get__(subject)
            return (scripted if len(turns) % 2 else generate)(*given, **options)

        subject._generate_single_turn = first_scripted
        rows = watched(subject)
        subject.train()
        assert len(turns) > 2 and rows
        return seen

    assert run(trl_ext, packing=True) == run(trl)


ELSEWHERE = {
    "a rollout_func": dict(rollout_func=lambda prompts, trainer: {}),
    "vLLM": dict(use_vllm=True),
    "continuous batching": dict(use_transformers_continuous_batching=True),
    "FSDP": dict(is_fsdp_enabled=True),
}


@pytest.mark.parametrize("name", ["transformers", "packing off", "ZeRO-3", *ELSEWHERE])
def test_generate_is_left_alone_where_others_generate_or_processes_run_in_step(name, tmp_path, monkeypatch):
    subject = grpo_trainers.trainer(tmp_path, rollout_func=None, packing=True)
    for attribute, value in ELSEWHERE.get(name, {}).items():
        monkeypatch.setattr(subject, attribute, value)
    monkeypatch.setattr(sampling, "is_deepspeed_zero3_enabled", lambda: name == "ZeRO-3")
    with sampling.generating(subject, is_packed=name != "packing off"):
        # With packing off weights are still cast once.
        assert ("generate" in vars(subject.model)) == (name in ("transformers", "packing off"))
    skipped = []
    monkeypatch.setattr(sampling, "known_rows_skipped", lambda model: skipped.append(model) or nullcontext())
    with sampling.generating(subject, is_packed=name != "packing off"):
        assert bool(skipped) == (name == "transformers")
    assert "generate" not in vars(subject.model)


def test_in_half_precision_tokens_have_the_log_probabilities_of_a_padded_forward(tmp_path):
    """Each token sampled with `top_k: 1` is the likeliest of a padded forward, within the rounding of bfloat16."""

    def policy():
        made = model().to(torch.bfloat16)
        made.lm_head.weight.data *= 10
        return made

    settings = dict(max_steps=1, top_k=1, num_generations=2, per_device_train_batch_size=16, packing=True)
    (rows,), _ = run(trl_ext, tmp_path, policy(), **settings)
    assert len({len(ids) for _, ids in rows}) > 2
    for text, ids in rows:
        assert not set(ids[:-1]) & set(ENDS) and (ids[-1] in ENDS or len(ids) == 24)
        given = tiny.tokenizer()(
            [text, tiny.words(*range(30, 60))], padding=True, return_tensors="pt"
        )  # one is padded
        added = torch.tensor([ids, ids])
        whole = torch.cat((given.input_ids, added), 1)
        mask = torch.cat((given.attention_mask, torch.ones_like(added)), 1)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            logits = policy()(input_ids=whole, attention_mask=mask, position_ids=positions).logits
        logps = logits[0, -len(ids) - 1 : -1].float().log_softmax(-1)
        chosen = logps.gather(1, added[0][:, None])[:, 0]
        assert (logps.max(-1).values - chosen).max() < 0.1
