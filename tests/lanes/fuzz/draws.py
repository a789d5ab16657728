"""Draws of a fuzzer: seeds, what a deviation is measured by, and the line that sums up."""

import os
from collections import Counter

import torch

FIRST_SEED = int(os.environ.get("FUZZ_SEED", "0"))
# Of the update, the largest weight change of all: what float32 and two orders of summing make of a few steps.
CLOSE = 1e-5
MOST_OVER_NOISE = 3.0
OUTCOMES: dict[str, Counter] = {}


def seeds(count: int) -> range:
    """The draws' seeds: FUZZ_DRAWS says how many, FUZZ_SEED where they begin."""
    return range(FIRST_SEED, FIRST_SEED + int(os.environ.get("FUZZ_DRAWS", count)))


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten().double().clone() for p in model.parameters()])


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


def summary(lane: str) -> str:
    found = OUTCOMES.get(lane, Counter())
    return f"{lane}: {found.total()} draws from seed {FIRST_SEED}: " + ", ".join(
        f"{count} {outcome}" for outcome, count in found.most_common()
    )
