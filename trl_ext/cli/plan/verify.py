"""`trl-ext plan --verify`: the best plan's training once more, counted by the memory twin beside the formulas.

The formulas search, in milliseconds and within a few per cent; the twin runs the real trainer on fake tensors, in a
process of its own, and counts every byte. What the twin does not run, generation and vLLM, is left out of both.
"""

from typing import Any

from trl_ext.errors import ConfigError
from trl_ext.memory.planner.planner import Plans
from trl_ext.memory.units import gib

# Half a minute for 8B, four minutes for 70B under ZeRO-3 (measured on two busy cores); time goes with the layers.
TIMEOUT_S = 600.0


def verified(plans: Plans, model: str) -> dict[str, Any]:
    """The two numbers for the best plan, or a refusal.

    Args:
        plans: What the planner found.
        model: The model as the command line names it.

    Returns:
        `refusal`, a sentence, "" if the twin has counted. Then also `phase`, where training peaks by the twin,
        `formula_gib` and `twin_gib` of training, `difference_frac` of the formula over the twin, and `seconds`.
    """
    if not plans.plans:
        return {"refusal": "Nothing fits, so there is no plan to verify."}
    from trl_ext.twin import run_apart, simulation_of
    from trl_ext.twin.simulation import find_config

    estimate = plans.best.estimate
    try:
        simulation = simulation_of(estimate.job, find_config(model), estimate.num_gpus)
    except ConfigError as error:
        return {"refusal": str(error)}
    result = run_apart(simulation, TIMEOUT_S)
    if result.refusal:
        return {"refusal": result.refusal}
    # The formulas' peak over the twin's phases, without vLLM's share of the card.
    peaks = [peak for phase, peak in estimate.worst.items() if phase in result.peaks]
    formula_gib = max(gib(peak.num_bytes - peak.terms.get("vLLM", 0.0)) for peak in peaks)
    twin_gib = result.peak_gib
    return {
        "refusal": "",
        "phase": max(set(result.peaks) - {"load"}, key=lambda phase: result.peaks[phase].num_bytes),
        "formula_gib": round(formula_gib, 3),
        "twin_gib": round(twin_gib, 3),
        "difference_frac": round(formula_gib / twin_gib - 1, 4),
        "seconds": result.seconds,
    }


def sentence(answer: dict[str, Any]) -> str:
    """The answer in words, one line."""
    if answer["refusal"]:
        return f"not verified: {answer['refusal']}"
    return (
        f"verified: training peaks in the phase '{answer['phase']}' at {answer['twin_gib']:.2f} GiB by the twin and "
        f"at {answer['formula_gib']:.2f} GiB by the formulas, {answer['difference_frac']:+.1%}. Counted in "
        f"{answer['seconds']:.0f} s, without generation and vLLM."
    )
