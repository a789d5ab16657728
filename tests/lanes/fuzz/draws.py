"""Draws of a fuzzer: seeds, what a deviation is measured by, and the line that sums up."""

import math
import os
from collections import Counter

import pytest
import torch

from tests.half_precision import error, geometric_mean

FIRST_SEED = int(os.environ.get("FUZZ_SEED", "0"))
# Of the update, the largest weight change of all: what float32 and two orders of summing make of a few steps.
CLOSE = 1e-5
MOST_OVER_NOISE = 3.0
OUTCOMES: dict[str, Counter] = {}
# Of the errors of gradients in half precision, ours over TRL's, the geometric mean of a lane's draws.
MOST_OF_MEAN, FEWEST_FOR_MEAN = 1.1, 10
# Of one draw. TRL in the other of these layouts is off itself by up to 1.14 in Reward, in GRPO by up to 7 (48 draws).
MOST_OF_ONE = 1.25
# TRL's rows padded further: the same mathematics, rounded otherwise.
LAYOUTS = ({}, {"pad_to_multiple_of": 64})
RATIOS: dict[str, list[float]] = {}


def seeds(count: int) -> range:
    """The draws' seeds: FUZZ_DRAWS says how many, FUZZ_SEED where they begin."""
    return range(FIRST_SEED, FIRST_SEED + int(os.environ.get("FUZZ_DRAWS", count)))


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten().double().clone() for p in model.parameters()])


def doubled(model: torch.nn.Module) -> torch.nn.Module:
    """The model in float64, in which no processor has the grouped product of a mixture's experts."""
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    return model.double()


def check_equal(lane: str, seed: int, settings: dict, run) -> None:
    """Fail where the update of `run(ours=True)` is off TRL's by more than three times what TRL is off itself.

    Rounding can decide more than a last digit: which token is above a quantile, or the last bit of a large weight. A
    draw that is off in float32 is repeated in float64, where it has to be close.

    Args:
        run: Returns the weights before and after training. Its argument `layout` holds settings that change nothing
            but rounding: the order in which TRL sums, or `in_float64`.
    """
    print(f"{lane} seed {seed}: {settings}")
    start, theirs = run(ours=False)
    moved = (theirs - start).abs().max().item()
    _, ours = run(ours=True)
    off = (ours - theirs).abs().max().item()
    outcome, noise = "close", 0.0
    if off > CLOSE * moved:
        _, again = run(ours=False, layout={"pad_to_multiple_of": 64})
        noise = (again - theirs).abs().max().item()
        outcome = "within TRL's own noise" if off <= MOST_OVER_NOISE * noise else "off"
        if outcome == "off":
            exact_start, exact_theirs = run(ours=False, layout={"in_float64": True})
            _, exact_ours = run(ours=True, layout={"in_float64": True})
            exact_off = (exact_ours - exact_theirs).abs().max().item()
            if exact_off <= CLOSE * (exact_theirs - exact_start).abs().max().item():
                outcome = f"close in float64 (off {exact_off:.2e})"
    elif not moved:
        outcome = "nothing moved"
    OUTCOMES.setdefault(lane, Counter())[outcome.partition(" (")[0]] += 1
    print(f"{lane} seed {seed}: {outcome}; moved {moved:.2e}, off {off:.2e}, TRL off itself {noise:.2e}")
    assert outcome != "off", f"FUZZ_SEED={seed} FUZZ_DRAWS=1 repeats it"


def precision_of(seed: int) -> str | None:
    """How a draw runs: None in float32; each third one in half precision, by turns under autocast and with weights."""
    in_turn = ("autocast", "bf16 weights", "autocast", "bf16 weights under autocast")
    return None if seed % 3 else in_turn[seed // 3 % 4]


def check_in_half(lane: str, seed: int, settings: dict, run) -> None:
    """Fail where gradients of ours in half precision are further off TRL's in float32 than TRL's own are.

    Args:
        run: Returns a trainer after its training and the gradients of its optimizer steps. Its argument `precision` is
            one of PRECISIONS, `layout` as in `check_equal`.
    """
    precision = precision_of(seed)
    print(f"{lane} seed {seed}: {precision}, {settings}")

    def errors(**changes) -> tuple[list[float], float]:
        _, truth = run(ours=False, precision="float32", layout=changes)
        theirs = [error(run(ours=False, precision=precision, layout=layout | changes)[1], truth) for layout in LAYOUTS]
        trainer, found = run(ours=True, precision=precision, layout=changes)
        assert trainer._packs
        return theirs, error(found, truth)

    note_errors(lane, seed, errors)


def note_errors(lane: str, seed: int, errors) -> None:
    """Note the errors of a draw in half precision; fail where ours is beyond all of the peer's.

    Rounding can decide which token is clipped, and is then no measure of an error. A draw that is beyond is repeated
    where nothing moves.

    Args:
        errors: Returns the peer's errors and ours, given settings that differ from the draw's.
    """
    theirs, ours = errors()
    outcome = "nothing moved in half precision" if math.isnan(ours) else "in half precision"
    if not math.isnan(ours):
        RATIOS.setdefault(lane, []).append(ours / math.prod(theirs) ** (1 / len(theirs)))
        RATIOS.setdefault(f"{lane}, the peer over itself", []).append(theirs[-1] / theirs[0])
    if ours > MOST_OF_ONE * max(theirs):
        of_unmoved, ours_unmoved = errors(learning_rate=1e-9)
        is_near = ours_unmoved <= MOST_OF_ONE * max(of_unmoved)
        outcome = "in half precision where nothing moves" if is_near else "beyond"
    OUTCOMES.setdefault(lane, Counter())[outcome] += 1
    shown = " ".join(f"{one:.5f}" for one in theirs)
    print(f"{lane} seed {seed}: {outcome}; error {ours:.5f}, the peer's {shown}")
    assert outcome != "beyond", f"FUZZ_SEED={seed} FUZZ_DRAWS=1 repeats it"


def check_draw(lane: str, seed: int, drawn, drawn_in_half, trained) -> None:
    """Compare a draw with TRL: its weights, or in half precision its gradients.

    Args:
        drawn, drawn_in_half: Return the settings of a seed.
        trained: Called with settings, seed and what `check_equal` passes to `run`.
    """
    in_half = precision_of(seed) is not None
    settings = drawn_in_half(seed) if in_half else drawn(seed)
    check = check_in_half if in_half else check_equal
    check(lane, seed, settings, lambda **how: trained(settings, seed, **how))


def check_mean_in_half(lane: str) -> None:
    ratios = RATIOS.get(lane, [])
    if len(ratios) < FEWEST_FOR_MEAN:
        pytest.skip(f"{len(ratios)} draws in half precision have no mean")
    assert geometric_mean(ratios) <= MOST_OF_MEAN


def show(request: pytest.FixtureRequest, text: str) -> None:
    """Print on the terminal itself, where a run without -s shows it."""
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\n{text}")


def summary(lane: str) -> str:
    found = OUTCOMES.get(lane, Counter())
    lines = [
        f"{lane}: {found.total()} draws from seed {FIRST_SEED}: "
        + ", ".join(f"{count} {outcome}" for outcome, count in found.most_common())
    ]
    for name, ratios in RATIOS.items():
        if name.partition(",")[0] == lane:
            span = f"{min(ratios):.3f} to {max(ratios):.3f}"
            lines.append(f"{name}: {len(ratios)} ratios of errors, mean {geometric_mean(ratios):.3f}, {span}")
    return "\n".join(lines)
