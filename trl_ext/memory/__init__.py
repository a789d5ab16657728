"""Memory planning without weights and without torch: cards, model shapes, bytes, plans, presets.

    from trl_ext.memory import plan

    plans = plan("ppo", "meta-llama/Meta-Llama-3-8B", "4xA40-48GB", allow=["lora"],
                 max_prompt_length=1024, max_completion_length=1024)
    print(plans.best.label, plans.best.estimate.peak_gib)

Every number is estimated by formulas.
"""

from trl_ext.memory.cards import CARDS, Card, Hardware, find_card, parse_gpus
from trl_ext.memory.formulas.estimate import Estimate, estimate
from trl_ext.memory.job import Job
from trl_ext.memory.models.find import find_shape
from trl_ext.memory.models.shapes import ModelShape
from trl_ext.memory.planner.folder import read_plan, write_plan
from trl_ext.memory.planner.planner import Plan, Plans, Refusal, plan
from trl_ext.memory.planner.presets import PRESETS, Preset, preset
from trl_ext.memory.planner.search import ALLOW

__all__ = [
    "ALLOW",
    "CARDS",
    "PRESETS",
    "Card",
    "Estimate",
    "Hardware",
    "Job",
    "ModelShape",
    "Plan",
    "Plans",
    "Preset",
    "Refusal",
    "estimate",
    "find_card",
    "find_shape",
    "parse_gpus",
    "plan",
    "preset",
    "read_plan",
    "write_plan",
]
