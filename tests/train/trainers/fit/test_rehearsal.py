"""The rehearsal before step 1 leaves nothing behind: with and without it, a run is the same to the bit."""

import random
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from peft import LoraConfig

from tests import grpo_trainers, ppo_trainers, reward_trainers, tiny
from tests.fake_card import FakeCard
from tests.nightly import nightly
from tests.preferences import pairs
from tests.reward_trainers import warnings_of
from trl_ext.errors import OutOfMemoryError
from trl_ext.memory import Job, estimate, find_shape, parse_gpus
from trl_ext.memory.planner.planner import Plan
from trl_ext.memory.units import GIB
from trl_ext.monitor.summary import summarize, token_rows
from trl_ext.trainers.fit import message
from trl_ext.trainers.fit.rehearsal import rehearsal
from trl_ext.trainers.fit.rehearsal.state import nothing_remains

_TIMES = ("_s", "_time", "runtime", "per_second")


def grpo(folder, **changes):
    model = changes.pop("model", None) or tiny.model("llama", attention_dropout=0.1)
    settings = dict(max_steps=3, gradient_accumulation_steps=2, adam_epsilon=1e-8, packing=True) | changes
    return grpo_trainers.trainer(folder, model=model, **settings)


def trained(trainer, **options):
    """Everything that is trained, and what was logged but for times."""
    trainer.train(**options)
    logs = [
        {name: value for name, value in entry.items() if not name.endswith(_TIMES)}
        for entry in trainer.state.log_history
    ]
    return ppo_trainers.trained_weights(trainer), logs


def check_alike(make, **options):
    """A run with the rehearsal and one without it; the rehearsal did run."""
    (with_it, its_logs), (without, logs) = (trained(make(memory_rehearsal=on), **options) for on in (True, False))
    assert ppo_trainers.distance(with_it, without) == 0
    assert str(its_logs) == str(logs)  # as text, in which NaN is NaN
    assert any("loss" in entry for entry in logs)


def noted(monkeypatch) -> list[str]:
    """What the trainers rehearse, from here on."""
    seen: list[str] = []
    plain = rehearsal._report
    monkeypatch.setattr(
        rehearsal, "_report", lambda trainer, batch, source: seen.append(batch.what) or plain(trainer, batch, source)
    )
    return seen


PAIRS = dict(gradient_accumulation_steps=2, logging_steps=1, per_device_train_batch_size=2)
LORA = LoraConfig(r=4, target_modules="all-linear", exclude_modules=["lm_head"], lora_dropout=0.1)
CHECKPOINTING = dict(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False})
# By kind of trainer, its settings, and what is rehearsed. Under a budget as many rows as it holds: 8 shared tokens of
# a prompt, and twice its last with 12 of a completion.
REHEARSED = [
    nightly("grpo", {}, "4 rows of 21 tokens"),
    nightly("grpo", {"packing": False}, "4 rows of 21 tokens"),
    ("grpo", {"max_tokens_per_forward": 40}, "2 rows of 21 tokens in each of two forwards after a prompt"),
    nightly("grpo", {"num_iterations": 2, "loss_type": "bnpo"}, "4 rows of 21 tokens"),
    nightly("grpo", {"gradient_accumulation_steps": 1}, "4 rows of 21 tokens"),
    ("grpo", CHECKPOINTING, "4 rows of 21 tokens"),
    nightly("grpo", {"entropy_coef": 0.01, "use_adaptive_entropy": True}, "4 rows of 21 tokens"),
    ("grpo", {"peft_config": LORA, "beta": 0.1}, "4 rows of 21 tokens"),
    ("adapter", {"packing": True}, "4 rows of 21 tokens"),
    *(nightly(critic, {"packing": True}, "4 rows of 21 tokens") for critic in ("head", "separate")),
    *(nightly(critic, {"packing": False}, "4 rows of 21 tokens") for critic in ppo_trainers.CRITICS),
    nightly("reward", {}, ""),
    nightly("reward", {"packing": False}, ""),
    ("reward", {"max_tokens_per_forward": 60}, ""),
]


@pytest.mark.parametrize(("kind", "changes", "what"), REHEARSED)
def test_a_run_trains_the_same_bits_with_a_rehearsal(kind, changes, what, tmp_path, monkeypatch):
    def make(**options):
        if kind == "grpo":
            return grpo(tmp_path, **changes, **options)
        if kind == "reward":
            return reward_trainers.trainer(tmp_path, train=pairs(16), max_steps=3, **PAIRS, **changes, **options)
        return ppo_trainers.trainer(kind, tmp_path, **changes, **options)

    seen = noted(monkeypatch)
    check_alike(make)
    assert len(seen) == 1 and what in seen[0] and ("behind one prompt" in seen[0]) == ("behind one prompt" in what)


def test_a_resumed_run_rehearses_and_ends_with_the_same_bits(tmp_path, monkeypatch):
    grpo(tmp_path, save_strategy="steps", save_steps=2, max_steps=2).train()
    seen = noted(monkeypatch)
    settings = dict(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    check_alike(lambda **options: grpo(tmp_path, **options), **settings)
    assert len(seen) == 1


# What is rehearsed --------------------------------------------------------------------------------------------------


def largest(trainer) -> dict:
    return trainer.largest_micro_batch().inputs


def test_every_row_has_the_longest_prompt_and_the_longest_completion(tmp_path):
    inputs = largest(grpo(tmp_path, share_prompt=False))
    assert inputs["prompt_ids"].shape == (4, 9)
    assert inputs["completion_ids"].shape == (4, 12)
    assert inputs["completion_mask"].all() and inputs["prompt_mask"].all()
    assert inputs["advantages"].abs().min() > 0


def num_prompts(inputs) -> int:
    return len({tuple(row) for row in inputs["prompt_ids"].tolist()})


MOST = [
    ({}, 1),  # a micro-batch is one group
    ({"share_prompt": False}, 4),
    ({"packing": False}, 4),
    ({"loss_type": "bnpo"}, 4),  # micro-batches stay as they were shuffled
    ({"num_generations": 2}, 2),
    ({"per_device_train_batch_size": 3, "num_generations": 2}, 2),
    ({"steps_per_generation": 4}, 4),  # a group's rows may be in different optimizer steps
]


def test_as_many_prompts_differ_as_may_meet_in_a_micro_batch(subtests, tmp_path):
    for changes, most in MOST:
        with subtests.test(str(changes)):
            assert num_prompts(largest(grpo(tmp_path, **changes))) == most


def test_no_row_is_longer_than_the_models_positions_and_a_plans_longer_prompt_counts(tmp_path):
    inputs = largest(grpo(tmp_path, model=tiny.model("llama", max_position_embeddings=16)))
    assert inputs["prompt_ids"].size(1) + inputs["completion_ids"].size(1) == 16
    trainer = grpo(tmp_path)
    trainer.args.memory_plan = SimpleNamespace(job=SimpleNamespace(max_prompt_length=30))
    assert largest(trainer)["prompt_ids"].size(1) == 30


def test_a_reward_models_longest_pairs_are_rehearsed_a_full_budget_and_a_streams_length_limit(tmp_path):
    trainer = reward_trainers.trainer(tmp_path, train=pairs(16), per_device_train_batch_size=3)
    (row,) = largest(trainer)["rows"]
    sizes = sorted(trainer._pair_sizes().tokens, reverse=True)
    assert (row.num_pairs, row.flat.num_tokens) == (3, sum(sizes[:3]))
    (row,) = largest(reward_trainers.trainer(tmp_path, train=pairs(16), max_tokens_per_forward=150))["rows"]
    assert 150 - 4 < row.flat.num_tokens <= 150
    stream = pairs(16).to_iterable_dataset()
    (row,) = largest(reward_trainers.trainer(tmp_path, train=stream, max_length=80, max_steps=1))["rows"]
    assert row.num_raw_tokens == 4 * 2 * 80


# When, and what is said ---------------------------------------------------------------------------------------------


def test_it_comes_once_before_the_first_batch_is_drawn_and_on_the_cpu_where_it_is_asked_for(tmp_path, monkeypatch):
    events = []
    monkeypatch.setattr(rehearsal, "rehearse", lambda *_: events.append("rehearsal"))
    trainer = grpo(tmp_path, max_steps=1, memory_rehearsal=True)
    plain = trainer._generate
    trainer._generate = lambda *args: events.append("generate") or plain(*args)
    trainer.train()
    trainer.train()
    assert events == ["rehearsal", "generate", "generate"]
    unasked = grpo(tmp_path, max_steps=1)
    unasked.train()
    assert events.count("rehearsal") == 1
    assert not [name for entry in unasked.state.log_history for name in entry if name.startswith("memory/")]


def test_what_cannot_be_rehearsed_is_said_in_one_sentence(tmp_path, caplog):
    layerwise = grpo(tmp_path, memory_rehearsal=True, optim="galore_adamw_layerwise")
    stream = pairs(8).to_iterable_dataset()
    streamed = reward_trainers.trainer(tmp_path, train=stream, max_length=None, max_steps=1)
    for trainer, reason in ((layerwise, "changes weights within backward"), (streamed, "is a stream")):
        caplog.clear()
        trainer.args.memory_rehearsal = True
        callback = rehearsal.Rehearsal(trainer)
        for _ in range(2):
            callback.on_train_begin(trainer.args, trainer.state, None)
        (said,) = [text for text in warnings_of(caplog) if "rehearsal" in text]
        assert reason in said


def fail_on(trainer, num_rows: int, error: RuntimeError, times: int = 100):
    """Let a forward of so many rows or more fail."""
    plain, failed = trainer._compute_loss, []

    def compute(model, inputs):
        if len(inputs["completion_ids"]) >= num_rows and len(failed) < times:
            failed.append(inputs)
            raise error
        return plain(model, inputs)

    trainer._compute_loss = compute
    return trainer


def test_out_of_memory_says_that_it_was_the_rehearsal_and_of_what(tmp_path):
    trainer = fail_on(grpo(tmp_path, memory_rehearsal=True), 1, torch.OutOfMemoryError("CUDA out of memory."))
    before = ppo_trainers.trained_weights(trainer)
    with pytest.raises(OutOfMemoryError) as caught:
        trainer.train()
    text = str(caught.value)
    assert text.startswith("Out of memory in the rehearsal, before step 1: 4 rows of 21 tokens")
    assert "per_device_train_batch_size=4" in text
    assert "memory_rehearsal=False" in text
    assert trainer.state.global_step == 0
    assert ppo_trainers.distance(before, ppo_trainers.trained_weights(trainer)) == 0


def test_a_micro_batch_that_fits_in_halves_is_trained_in_halves(tmp_path):
    """The rescue of training works here, too, so that step 1 begins with what fits."""
    error = torch.OutOfMemoryError("CUDA out of memory.")
    trainer = fail_on(grpo(tmp_path, memory_rehearsal=True), 3, error, times=1)
    trainer.train()
    assert trainer.forward_loop.halving.level["actor"] == 1
    assert trainer.state.global_step == 3


def state_of(trainer) -> list:
    """What a step of training would read."""
    weights = trainer.model.parameters()
    return [
        random.getstate(),
        str(np.random.get_state()),
        torch.get_rng_state().tolist(),
        [module.training for module in trainer.model.modules()],
        [weight.grad for weight in weights],
        trainer.accelerator.sync_gradients,
        trainer._metrics["train"] == {},
        {name: value for name, value in vars(trainer).items() if isinstance(value, (int, float))},
    ]


def test_even_a_failed_rehearsal_leaves_the_trainer_as_it_was(tmp_path):
    trainer = grpo(tmp_path)
    trainer.model.eval()
    books, clock, before = trainer._metrics, trainer.clock, state_of(trainer)
    with pytest.raises(ZeroDivisionError), nothing_remains(trainer):
        trainer.rehearse(trainer.largest_micro_batch())
        trainer.accelerator.gradient_state._set_sync_gradients(False)
        np.random.rand(3), random.random(), torch.rand(3)
        assert trainer.model.training and next(trainer.model.parameters()).grad is not None
        raise ZeroDivisionError
    assert state_of(trainer) == before
    assert (trainer._metrics is books) and (trainer.clock is clock)


# On a card ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def card(monkeypatch):
    """A card that a test fills by hand, found by every trainer."""
    fake = FakeCard()
    monkeypatch.setattr(rehearsal, "source_of", lambda device: fake)
    return fake


def test_a_card_turns_the_rehearsal_on_and_its_line_tells_peak_and_state(card, tmp_path, caplog):
    def run(peak_gib):
        caplog.clear()
        trainer = grpo(tmp_path, max_steps=1)
        plain = trainer._compute_loss
        trainer._compute_loss = lambda *args: card.allocate(peak_gib) or plain(*args)
        trainer.train()
        return trainer, caplog.text

    trainer, said = run(17.4)
    num_weights = sum(p.numel() for p in trainer.model.parameters())
    assert rehearsal.state_bytes_to_come(trainer) == 0, "it is there after step 1"
    trainer.state.global_step = 0
    assert rehearsal.state_bytes_to_come(trainer) == 8 * num_weights
    line = "Rehearsal: 4 rows of 21 tokens, 17.4 GiB allocated at the peak; the optimizer's state of 0.0 GiB comes "
    assert line in said and "That leaves" not in said
    _, said = run(22.5)
    assert "That leaves 0.5 GiB of 24.0 GiB. Set per_device_train_batch_size=2" in said


def planned(**settings):
    """The plan of a run as it is, of a model for which attention and layers take time."""
    job = Job("grpo", max_prompt_length=8192, num_generations=32, global_batch=32, checkpoint_every=1, **settings)
    return Plan(estimate(job, find_shape("Qwen/Qwen3-1.7B"), parse_gpus("1xH100-80GB")))


def test_room_on_the_card_is_named_with_the_checkpointing_that_fits_and_is_fastest(
    card, tmp_path, monkeypatch, caplog
):
    now = planned().estimate
    monkeypatch.setattr(message, "plan_of", lambda trainer: planned())

    def said(peak_gib, total_gib=80, **changes):
        caplog.clear()
        settings = dict(CHECKPOINTING, max_steps=1, logging_steps=1) | changes
        trainer = grpo(tmp_path, **settings)
        plain = trainer._compute_loss
        trainer._compute_loss = lambda *args: card.allocate(peak_gib) or plain(*args)
        monkeypatch.setattr(card, "free_and_total_bytes", lambda: ((total_gib - peak_gib) * GIB, total_gib * GIB))
        trainer.train()
        return caplog.text, dict(row[:2] for row in token_rows(summarize(trainer.state.log_history)))

    text, rows = said(20)
    options = re.search(r"gradient_checkpointing_kwargs: (\{.*?\}) would make updates (\d+)% shorter", text)
    kept = re.fullmatch(r"\{keep_attention: true, every_n_layers: (\d)\}", options[1])
    then = estimate(replace(now.job, keep_attention=True, checkpoint_every=int(kept[1])), now.shape, now.hardware)
    assert int(options[2]) == round(100 * (1 - then.seconds["update"] / now.seconds["update"])) > 2
    more = (then.worst["update"].num_bytes - now.worst["update"].num_bytes) / GIB
    assert 1.1 * more <= 80 - 20 - 0.05 * 80 and f"take {more:.1f} GiB more of this card (estimated)" in text
    assert rows["would be faster"].endswith("more of this card (estimated).")

    kept_alone = estimate(replace(now.job, keep_attention=True), now.shape, now.hardware)
    extra = (kept_alone.worst["update"].num_bytes - now.worst["update"].num_bytes) / GIB
    assert "kwargs: {keep_attention: true} would" in said(75 - 1.1 * extra - 0.5)[0]
    for changes in (dict(gradient_checkpointing=False, gradient_checkpointing_kwargs=None), dict(peak_gib=77)):
        text, rows = said(**{"peak_gib": 20, **changes})
        assert "shorter" not in text and "would be faster" not in rows
    monkeypatch.setattr(message, "plan_of", lambda trainer: planned(keep_attention=True))
    assert "{keep_attention: true}" not in said(74)[0], "it is there already"


def test_a_plan_that_was_chosen_is_not_argued_with(monkeypatch):
    args = SimpleNamespace(gradient_checkpointing=True, memory_plan=planned())
    assert message.faster_checkpointing(SimpleNamespace(args=args), 80 * GIB) == ""


@pytest.mark.parametrize("kind", ["grpo", "ppo", "reward"])
def test_every_log_entry_of_training_has_the_same_keys_of_memory(kind, card, tmp_path):
    settings = dict(memory_rehearsal=False, max_steps=4, logging_steps=1)
    make = {
        # Rollouts are used twice, so that every other step generates nothing.
        "grpo": lambda: grpo(tmp_path, num_iterations=2, **settings),
        "ppo": lambda: ppo_trainers.trainer("separate", tmp_path, num_ppo_epochs=2, **settings),
        "reward": lambda: reward_trainers.trainer(tmp_path, train=pairs(16), **settings),
    }
    trainer = make[kind]()
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    keys = [{name for name in entry if name.startswith("memory/")} for entry in entries]
    phases = {"reward": ["update", "step"]}.get(kind, ["generate", "score", "update", "step"])
    rest = {"memory/reserved_gib", "memory/free_share", "memory/alloc_retries"}
    assert len(entries) == 4
    assert keys == [{f"memory/{phase}_gib" for phase in phases} | rest] * 4


def test_peaks_are_told_by_phase_and_the_rehearsals_is_in_none(card, tmp_path):
    trainer = grpo(tmp_path, max_steps=2, logging_steps=2)
    loss, score = trainer._compute_loss, trainer._calculate_rewards
    sizes = iter([20, 20, 8, 9, 7, 7])  # two micro-batches of the rehearsal, then two a step
    trainer._compute_loss = lambda *args: card.allocate(next(sizes)) or loss(*args)
    trainer._calculate_rewards = lambda *args: card.allocate(3) or score(*args)
    trainer.train()
    (entry,) = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert (entry["memory/update_gib"], entry["memory/step_gib"]) == (9.0, 0.0)
