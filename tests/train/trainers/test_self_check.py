"""The packing self-check in the users' precision: sound models pack, and every planted fault is found."""

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch.nn import functional

import trl_ext
from tests import grpo_trainers, ppo_trainers, reward_trainers, tiny, trained
from tests.half_precision import moved_weights
from tests.nightly import daily, nightly
from tests.preferences import reward_model
from trl_ext.packing import attention, kernels
from trl_ext.packing import check as packing_check
from trl_ext.packing.check import CheckResult
from trl_ext.packing.families import state
from trl_ext.packing.table import SegmentTable
from trl_ext.trainers.forward import pooled_head
from trl_ext.trainers.step import score, self_check
from trl_ext.trainers.step.self_check import check_causal_model

pytestmark = pytest.mark.own_self_check
CPU = torch.device("cpu")
# Wide enough that the numbers of half precision are not hidden below the check's floor.
WIDE = dict(hidden_size=256, intermediate_size=384, num_hidden_layers=8, head_dim=64)
TRAINERS = ("grpo", "reward", "ppo")
LAYERS = 6  # of the trained model's thirty, by day
# (dtype of the weights, autocast to bfloat16)
BF16, AUTOCAST = (torch.bfloat16, False), (torch.float32, True)


def trainer(kind: str, model: Any, autocast: bool, folder, tokenizer: Any, critic: Any = None) -> Any:
    """A trainer of a kind, which has checked its models."""
    common = dict(bf16=autocast, gradient_checkpointing=False)
    if kind == "reward":
        tokenizer.padding_side = "right"
        return reward_trainers.trainer(folder, model=model, processing_class=tokenizer, **common)
    if kind == "grpo":
        return grpo_trainers.trainer(folder, model=model, processing_class=tokenizer, **common)
    args = trl_ext.PPOConfig(
        str(folder), **tiny.QUIET_ON_CPU | common, critic="separate", response_length=8, per_device_train_batch_size=2
    )
    given = dict(train_dataset=ppo_trainers.prompts(), reward_funcs=ppo_trainers.reward, value_model=critic)
    return trl_ext.PPOTrainer(args, tokenizer, model, **given)


@pytest.fixture
def results(monkeypatch) -> list[CheckResult]:
    """The results of the self-checks that trainers make."""
    found, check = [], packing_check.check

    def noted(*args, **kwargs):
        found.append(check(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(self_check, "check", noted)
    return found


def check_packs(kind: str, results: list[CheckResult], *given: Any) -> None:
    """Fail unless the trainer's models, the critic among them, pass and nothing was changed by a neighbour."""
    subject = trainer(kind, *given)
    assert subject._packs, subject.why_padded
    assert len(results) == (2 if kind == "ppo" else 1)
    for result in results:
        # Experts get other numbers of tokens, and may round the last bit otherwise.
        assert result.is_exact and result.leak <= 1e-6
        assert result.error <= 0.75 * result.tolerance, f"little is left of the tolerance: {result}"


@pytest.mark.parametrize(("dtype", "autocast"), [BF16, nightly(*AUTOCAST)], ids=["bf16", "autocast"])
@pytest.mark.parametrize("num_layers", daily([LAYERS, None], LAYERS))
@pytest.mark.parametrize("kind", TRAINERS)
def test_the_quickstarts_trained_model_packs(kind, num_layers, dtype, autocast, tmp_path, results):
    own = trained.classifier(dtype, num_layers) if kind != "grpo" else None
    model = own if kind == "reward" else trained.model(dtype, 2 if kind == "ppo" else num_layers)
    check_packs(kind, results, model, autocast, tmp_path, trained.tokenizer(), own)


FAMILIES = (*tiny.PACKABLE, *tiny.MIXTURE)


@pytest.mark.parametrize(("dtype", "autocast"), [BF16, AUTOCAST], ids=["bf16", "autocast"])
@pytest.mark.parametrize(
    ("kind", "family", "seed"),
    [
        # By day each family with one trainer, and each trainer with two families.
        (kind, family, seed) if seed == number and number % 3 == place else nightly(kind, family, seed)
        for place, kind in enumerate(TRAINERS)
        for number, family in enumerate(FAMILIES)
        for seed in range(7)
    ],
)
def test_a_sound_random_model_packs(kind, family, seed, dtype, autocast, tmp_path, results, monkeypatch):
    """252 checks, of which `make test` runs twelve; PPO's look at its critic too."""
    monkeypatch.setattr(packing_check, "probes", partial(packing_check.probes, seed=seed))
    wide = {**WIDE, "moe_intermediate_size": 64} if family in tiny.MIXTURE else WIDE
    if family == "mistral_window":
        wide = {**wide, "num_key_value_heads": 4}
    critic = None
    if kind != "grpo":
        critic = reward_model(tmp_path / "model", family, seed=seed, **wide).to(dtype)
    model = critic if kind == "reward" else tiny.model(family, seed, **wide).to(dtype)
    check_packs(kind, results, model, autocast, tmp_path, tiny.tokenizer(), critic)


def test_a_wide_reward_model_packs_and_says_so(tmp_path):
    """The wider a reward model, the more numbers are compared, of which the largest may be far off."""
    model = reward_model(tmp_path / "model", hidden_size=1024, num_hidden_layers=4).to(torch.bfloat16)
    subject = reward_trainers.trainer(tmp_path, model=model, max_steps=1, logging_steps=1)
    subject.train()
    assert subject.state.log_history[0]["packing/is_on"] == 1.0
    assert "packing/why_off" not in subject.state.log_history[0]


# Faults -------------------------------------------------------------------------------------------------------------


def seen_keys(table: SegmentTable, fault: str) -> torch.Tensor:
    """Which keys each token of a flat row sees, [T, T], with a fault."""
    segments = table.segments
    seen = torch.zeros(segments[-1].end, segments[-1].end, dtype=torch.bool)
    if fault == "segments ignored":
        return ~seen.triu(1)
    roots = [i for i, segment in enumerate(segments) if segment.is_prefix]
    for chain in table.chains:
        own = segments[chain[-1]]
        rows = slice(own.start, own.end)
        square = torch.ones(own.length, own.length, dtype=torch.bool)
        seen[rows, rows] = square if fault == "acausal" else square.tril()
        for number in chain[:-1] if fault != "prefix missed" else ():
            if fault == "another group's prefix":
                number = roots[(roots.index(number) + 1) % len(roots)]
            prefix = segments[number]
            begin, end = prefix.start + (fault == "first key missed"), prefix.end - (fault == "last key missed")
            seen[rows, begin:end] = True
        if own.start and (fault == "neighbour's key" or (fault == "root's neighbour" and own.parent is None)):
            seen[rows, own.start - 1] = True
    return seen


def masked(fault: str) -> Callable[..., Any]:
    """Return what chooses a kernel whose mask has a fault."""

    def kernel(query, key, value, segments, *, scale, window, dropout=0.0):
        seen = seen_keys(segments, fault)
        grouped = query.shape[1] != key.shape[1]
        out = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, scale=scale, enable_gqa=grouped
        )
        return out.transpose(1, 2).contiguous()

    return lambda *args, **kwargs: kernel


MASKS = (
    *("segments ignored", "acausal", "prefix missed", "another group's prefix", "first key missed", "last key missed"),
    *("neighbour's key", "root's neighbour"),
)
POSITIONS = ("positions of the row", "positions one further")
KERNELS = ("sdpa_attention", "merged_attention")


def plant(fault: str, monkeypatch) -> None:
    if fault in MASKS:
        monkeypatch.setattr(attention, "choose_kernel", masked(fault))
    elif fault in KERNELS:
        whole = getattr(kernels, fault)
        monkeypatch.setattr(kernels, fault, lambda *args, **kwargs: 1.1 * whole(*args, **kwargs))
    elif fault in POSITIONS:
        call = score.call_flat

        def shifted(model, row, **options):
            positions = row.position_ids.clone()
            if fault == "positions of the row":
                positions[:] = torch.arange(positions.shape[-1])
            for segment in row.table.segments if fault == "positions one further" else ():
                if segment.parent is not None:
                    positions[..., segment.start : segment.end] += 1
            return call(model, dataclasses.replace(row, position_ids=positions), **options)

        for room in (score, pooled_head):
            monkeypatch.setattr(room, "call_flat", shifted)
    elif fault == "window ignored":
        monkeypatch.setattr(attention, "_window", lambda *_: None)
    else:
        whole = state.StateDispatch._go

        def leaking(self, order, *args, **kwargs):
            if (self.by_segment is state._convolution) != (fault == "convolution leaks"):
                return whole(self, order, *args, **kwargs)
            order.is_read.append(True)
            own = {n: v for n, v in kwargs.items() if n not in ("cu_seq_lens_q", "cu_seqlens", "seq_idx")}
            return self.plain(*args, **own)

        monkeypatch.setattr(state.StateDispatch, "_go", leaking)


def result_of(model: Any, autocast: bool = False) -> Any:
    attention.take_segments(model.config)
    state.begin_anew(model)
    rounds = autocast or model.dtype != torch.float32
    context = partial(torch.autocast, "cpu", torch.bfloat16) if autocast else nullcontext
    return check_causal_model(model.eval(), model.config, CPU, context, half_precision=rounds, share_prompt=True)


@cache
def smollm2(dtype: torch.dtype) -> Any:
    from trl.trainer.utils import add_fused_lm_head

    from trl_ext.trainers.forward.calls import let_positions_be_chosen

    model = trained.model(dtype, 10)  # of fewer layers a single missed key would drown in the rounding
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    let_positions_be_chosen(model)
    return model


FAULTS = (*MASKS, *POSITIONS, *KERNELS)
# What is hardest to see: one key of many, or one position.
HARDEST = ("last key missed", "neighbour's key", "positions one further")


@pytest.mark.parametrize("fault", daily(FAULTS, *HARDEST))
def test_a_fault_in_half_precision_of_a_trained_model_is_found(fault, monkeypatch):
    plant(fault, monkeypatch)
    result = result_of(smollm2(torch.bfloat16))
    assert not result.failure and not result.is_exact


@pytest.mark.parametrize(
    ("family", "fault"),
    [
        *(("llama", fault) for fault in FAULTS),
        ("mistral_window", "window ignored"),
        ("lfm2", "convolution leaks"),
        ("qwen3_5", "recurrence leaks"),
    ],
)
def test_a_fault_in_float32_is_found(family, fault, monkeypatch, tmp_path):
    subject = grpo_trainers.trainer(tmp_path, model=family)
    assert subject._packs and result_of(subject.model).is_exact
    plant(fault, monkeypatch)
    result = result_of(subject.model)
    assert not result.failure and not result.is_exact


@pytest.mark.nightly
def test_a_token_that_padding_alone_moves_by_nats_hides_no_fault(monkeypatch):
    """Where the sink of attention just forms or just does not, a token moves by nats, and the check sees that too."""

    def moved(numbers, rows):
        found = numbers(rows)
        return [found[0] + 8.0 * (torch.arange(len(found[0])) == 0), *found[1:]]

    model, check = smollm2(torch.bfloat16), packing_check.check

    def with_a_move(side):
        def changed(alone, padded, packed, *rest):
            sides = {"padded": padded, "packed": packed}
            sides[side] = partial(moved, sides[side])
            return check(alone, *sides.values(), *rest)

        monkeypatch.setattr(self_check, "check", changed)

    with_a_move("packed")
    assert result_of(model).is_exact, "no false alarm where the packed side has the token"
    with_a_move("padded")
    plant("prefix missed", monkeypatch)
    assert not result_of(model).is_exact, "no blindness where the padded side has it"


@pytest.mark.parametrize("seed", range(5))
def test_a_number_that_padding_alone_moves_far_hides_no_fault_of_all_numbers(seed, monkeypatch):
    """Sizes as measured on a reward model in bf16: a tenth of padding's numbers .04 off, and by a fault all .0356."""
    monkeypatch.setattr(packing_check, "probes", partial(packing_check.probes, seed=seed))
    dice = torch.Generator().manual_seed(seed)

    def alone(row):
        return torch.zeros(1)

    def padded(rows):
        far = int(torch.randint(len(rows), (), generator=dice))
        return [
            torch.full((1,), 0.04) if i == far else 0.0065 * torch.randn(1, generator=dice) for i in range(len(rows))
        ]

    def packed(off, rows):
        return [torch.full((1,), off) for _ in rows]

    config = tiny.model("llama").config
    sound, faulty = (
        packing_check.check(alone, padded, partial(packed, off), config, half_precision=True)
        for off in (0.0065, 0.0356)
    )
    assert sound.error <= sound.tolerance and faulty.error > faulty.tolerance


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("fault", [None, "positions one further"])
def test_positions_of_a_reward_model_are_checked_by_every_seed_of_the_probes(
    fault, seed, tmp_path, results, monkeypatch
):
    monkeypatch.setattr(packing_check, "probes", partial(packing_check.probes, seed=seed))
    model = trained.classifier(torch.float32)
    torch.manual_seed(60)
    torch.nn.init.normal_(model.score.weight, std=0.05)
    model = moved_weights(model).to(torch.bfloat16)
    if fault is not None:
        plant(fault, monkeypatch)
    trainer("reward", model, False, tmp_path, trained.tokenizer())
    print(results)  # pytest -rP shows it
    assert results[0].is_exact == (fault is None) and not results[0].failure
