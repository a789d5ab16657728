"""How old a measured figure is: the commits since its own that changed the folders that it depends on.

    python -m benchmarks.ages

prints a line for each file of `benchmarks/results`. The documentation site prints the same numbers: `mkdocs.yml` names
this file as a hook.
"""

import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
# A figure on README may be this many commits of its folders old.
MOST_COMMITS = 100

UPDATE = ("packing", "trainers/forward", "trainers/step")
GRPO = (*UPDATE, "trainers/grpo")
STEP = (*GRPO, "trainers/generation")
REWARD = (*UPDATE, "trainers/reward")
PPO = (*GRPO, "trainers/ppo")
RULES = ("rewards",)
# File of results: the folders of `trl_ext` that its figures depend on.
DEPENDS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("activations_cpu", "sequence_parallel_cpu"), (*PPO, "trainers/reward")),
    **dict.fromkeys(("gpu_exact_h100", "gpu_memory_h100"), ("memory/formulas", *PPO, "trainers/reward")),
    **dict.fromkeys(("async_trees_cpu", "balance", "planning_cpu"), ("packing",)),
    **dict.fromkeys(("continuous_batching_cpu", "generation_cpu"), ("trainers/generation",)),
    **dict.fromkeys(("learning_cpu", "whole_step_cpu", "ahead_learning_cpu", "overlap_cpu", "story_cpu"), STEP),
    **dict.fromkeys(("overlap_judged_cpu", "curriculum_cpu"), STEP),
    **dict.fromkeys(("gpu_prof_h100", "gpu_speed_h100", "grpo_update_cpu", "images_cpu"), GRPO),
    **dict.fromkeys(("forks_cpu", "kept_prompts_cpu"), GRPO),
    **dict.fromkeys(("reward_accuracy_cpu", "reward_cpu", "reward_deep_cpu"), REWARD),
    **dict.fromkeys(("critic_start_cpu", "family_cpu", "ppo_cpu", "ppo_memory_cpu"), PPO),
    **dict.fromkeys(("answers", "code_tasks_cpu", "judges_cpu", "prose_rules_cpu", "reading"), RULES),
    "prose_frames_cpu": RULES,
    **dict.fromkeys(("rewards_cpu", "uncomputed"), RULES),
    "checkpoint_cpu": ("trainers/checkpoints",),
}


def measured_commit(name: str) -> str:
    """Return the commit that a file of results names, without the `+` of a changed working tree."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["commit"].rstrip("+")


def age(name: str) -> int | None:
    """Return the commits since a file's own that changed its folders; None where the history lacks that commit."""
    folders = [f"trl_ext/{folder}" for folder in DEPENDS[name]]
    words = ["git", "-C", str(ROOT), "rev-list", "--count", "--no-merges", f"{measured_commit(name)}..HEAD", "--"]
    try:
        found = subprocess.run([*words, *folders], capture_output=True, text=True, check=False)
    except OSError:  # no git on this machine
        return None
    return int(found.stdout) if found.returncode == 0 else None


def words_of_age(name: str) -> str:
    """Return "measured 12 commits ago", or the commit where its history is absent."""
    commits = age(name)
    if commits is None:
        return f"measured at `{measured_commit(name)}`"
    return f"measured {commits} commit{'s' * (commits != 1)} ago"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs for each page: give the age in place of "measured at `COMMIT`<!-- FILE -->"."""
    return re.sub(r"measured at `\w+`<!-- (\w+) -->", lambda found: words_of_age(found[1]), markdown)


if __name__ == "__main__":
    for one in sorted(DEPENDS):
        print(f"{one:24} {words_of_age(one)} (`{measured_commit(one)}`; {', '.join(DEPENDS[one])})")
