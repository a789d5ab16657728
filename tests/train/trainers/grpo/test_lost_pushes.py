"""A sampler that keeps old weights ends the run within a few steps, and one that takes them never does."""

from collections import defaultdict

import pytest
import torch
from transformers import TrainerState

from tests import grpo_trainers, ppo_trainers, sampling_servers, tiny
from tests.nightly import nightly
from trl_ext.errors import SamplerError
from trl_ext.trainers.generation.pushes import LOGIT_DIFFERENCE, NUM_TIMES, PATIENCE, SMALLEST, PushWatch, compared

torch.set_num_threads(1)

SERVED = dict(use_vllm=True, vllm_mode="server", rollout_func=None, learning_rate=1e-2)
NEVER, ALWAYS = 10**9, 0


def lossy(dtype, taken):
    """Servers that take the first `taken` pushes, and lose all others."""

    class Servers(sampling_servers.SamplingServers):
        policy_of = staticmethod(lambda: tiny.model("llama").to(dtype))
        num_pushes = 0

        def update_named_params(self, metadata, named_params):
            given = list(named_params) if self.num_pushes >= taken else named_params
            self.num_pushes += 1
            if self.num_pushes <= taken:
                super().update_named_params(metadata, given)

    return Servers


def made(kind, folder, monkeypatch, taken, dtype=torch.float32, **changes):
    sampling_servers.install(monkeypatch, lossy(dtype, taken))
    model = tiny.model("llama").to(dtype)
    if kind == "ppo":
        run = ppo_trainers.trainer("separate", folder, model=model, response_length=6, **SERVED | changes)
    else:
        run = grpo_trainers.trainer(folder, model=model, max_completion_length=6, **SERVED | changes)
    return run


KINDS = {
    "grpo": {},
    "iterations": dict(num_iterations=2, steps_per_generation=2, gradient_accumulation_steps=2),
    "ahead": dict(generation_ahead=1, learning_rate=1e-3),  # some steps from where the ratio is cut
    "ppo": {},
}


LOST = [*((kind, ALWAYS) for kind in KINDS), ("grpo", 5), ("ppo", 5)]


def in_turns(cases):
    """Each case in one type of numbers by day, the types in turn, and in the other by night."""
    types = [torch.float32, torch.bfloat16]
    for number, case in enumerate(cases):
        yield (*case, types[number % 2])
        yield nightly(*case, types[1 - number % 2])


@pytest.mark.parametrize(("kind", "taken", "dtype"), in_turns(LOST))
def test_lost_pushes_end_the_run_within_few_steps(kind, taken, dtype, tmp_path, monkeypatch):
    run = made(kind, tmp_path, monkeypatch, taken, dtype, max_steps=40, **KINDS[kind])
    with pytest.raises(SamplerError, match=r"In the last 3 optimizer steps its logits differ from the trainer's by"):
        run.train()
    assert run.state.global_step <= taken + (25 if kind == "ahead" else 10)


@pytest.mark.parametrize(("kind", "dtype"), in_turns((kind,) for kind in KINDS))
@pytest.mark.parametrize("seed", [0, *map(nightly, range(1, 20))])
def test_pushes_that_arrive_end_no_run(kind, dtype, seed, tmp_path, monkeypatch):
    run = made(kind, tmp_path, monkeypatch, NEVER, dtype, seed=seed, max_steps=12, **KINDS[kind])
    run.train()
    found = [entry[LOGIT_DIFFERENCE] for entry in run.state.log_history if LOGIT_DIFFERENCE in entry]
    assert len(found) == 12 and run.state.global_step == 12
    if kind != "ahead":  # far from the limit, not just below it
        assert max(found) <= 0.5 * max(SMALLEST, NUM_TIMES * found[0])


def test_a_resumed_run_knows_its_first_difference(tmp_path, monkeypatch):
    saved = dict(max_steps=5, save_strategy="steps", save_steps=5)
    made("grpo", tmp_path, monkeypatch, NEVER, **saved).train()
    sampling_servers.install(monkeypatch, lossy(torch.float32, ALWAYS))  # starts from the weights before step 1
    run = grpo_trainers.trainer(
        tmp_path, max_completion_length=6, **SERVED | dict(max_steps=12, save_strategy="steps", save_steps=5)
    )
    with pytest.raises(SamplerError):
        run.train(resume_from_checkpoint=True)
    assert run.state.global_step == 5 + PATIENCE - 1  # the third step with them ends within


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_run_that_is_resumed_within_a_block_generated_ahead_is_not_ended(dtype, tmp_path, monkeypatch):
    """Four steps train on one block, whose samples are of older weights by design."""
    changes = dict(steps_per_generation=4, num_iterations=2, gradient_accumulation_steps=2, learning_rate=3e-2)
    changes |= dict(max_steps=9, save_strategy="steps", save_steps=1, generation_ahead=1)
    whole = made("ahead", tmp_path / "whole", monkeypatch, NEVER, dtype, **changes)
    whole.train()
    again = made("ahead", tmp_path / "again", monkeypatch, NEVER, dtype, **changes)
    again.train(str(tmp_path / "whole" / "checkpoint-5"))
    first, *found = (e[LOGIT_DIFFERENCE] for e in whole.state.log_history if LOGIT_DIFFERENCE in e)
    assert min(found[4:]) > max(SMALLEST, NUM_TIMES * first), "far from the first difference"
    resumed = [e[LOGIT_DIFFERENCE] for e in again.state.log_history if LOGIT_DIFFERENCE in e]
    assert resumed == [first, *found]


# The rule ----------------------------------------------------------------------------------------------------------


def test_the_difference_is_that_of_logits_however_sure_the_policy_is():
    draw = torch.Generator().manual_seed(0)
    found = []
    for scale in (1.0, 4.0):  # unsure, and sure of its tokens
        logits = torch.randn(4000, 50, generator=draw) * scale
        noise = torch.randn(4000, 50, generator=draw) * 0.01
        tokens = torch.multinomial(logits.softmax(-1), 1, generator=draw)
        logps, sampled = ((logits + one).log_softmax(-1).gather(1, tokens)[:, 0] for one in (noise, 0))
        difference, uncertainty = compared(logps, sampled).tolist()
        found.append(difference / uncertainty)
    assert max(found) < 1.5 * min(found) and found == pytest.approx([0.009, 0.009], rel=0.35)


def test_a_token_that_the_sampler_did_not_score_does_not_count():
    logps, sampled = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, torch.nan])
    assert compared(logps, sampled).tolist() == pytest.approx([0.5, 1 - 2.718281828**-1.5])


def look(watch, difference, move=0.0, times=1):
    for _ in range(times):
        watch.look(torch.tensor([difference, 1.0]), move, TrainerState(), defaultdict(list))


def test_a_few_far_steps_are_let_pass_and_then_counted_anew():
    watch = PushWatch()
    for _ in range(4):
        look(watch, 0.02)
        look(watch, 1.0, times=PATIENCE - 1)
    with pytest.raises(SamplerError, match=r"differ from the trainer's by 1 on average, and by 0\.02"):
        look(watch, 1.0)


def test_samples_that_are_older_by_design_may_differ_by_more_while_updates_grow():
    watch = PushWatch()
    look(watch, 1e-4)
    for step in range(1, 10):  # a warm-up: the learning rate rises
        look(watch, 0.1 * step, 1e-3 * step)
    look(watch, 2.6, 9e-3, times=PATIENCE)
    with pytest.raises(SamplerError):
        look(watch, 2.8, 9e-3, times=PATIENCE)


def test_a_step_without_a_sampled_token_says_nothing():
    metrics, nothing = defaultdict(list), torch.zeros(2)
    PushWatch().look(nothing, 0.0, TrainerState(), metrics)
    assert not metrics
