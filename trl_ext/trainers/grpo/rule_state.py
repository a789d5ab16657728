"""Rules around a training step: begun early, kept in step over ranks, saved with a checkpoint."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from trl_ext.errors import TrlExtError
from trl_ext.rewards import RuleSet

FILE = "rules.json"
# What TRL passes on under names of its own.
_NOT_COLUMNS = ("prompt", "completion", "completion_ids")


def start_scoring(
    functions: Sequence[Any],
    inputs: Sequence[Mapping[str, Any]],
    prompts: Sequence[Any],
    completions: Sequence[Any],
    completion_ids: Sequence[Any],
) -> None:
    """Let workers begin with what was generated while the log-probabilities are computed.

    TRL asks for the rewards later; a rule set that is then asked for the same rows waits for these. What is wrong with
    the rows is said there.
    """
    if not inputs or not isinstance(completions, list):
        return  # called by no training step, or by a rollout function that gives something else
    columns = {name: [row[name] for row in inputs] for name in inputs[0] if name not in _NOT_COLUMNS}
    for rules in _rule_sets(functions):
        try:
            rules.start(prompts=prompts, completions=completions, completion_ids=completion_ids, **columns)
        except TrlExtError:
            continue


def synchronise(functions: Sequence[Any], accelerator: Any) -> None:
    """Let every rank know the totals that all have seen, where a rule set normalises by them. Collective."""

    def gather(numbers: Sequence[float]) -> list[list[float]]:
        mine = torch.tensor([numbers], dtype=torch.float64).to(accelerator.device)
        return accelerator.gather(mine).tolist()

    for rules in _rule_sets(functions):
        if rules.normalise:
            rules.synchronise(gather)


def load_state(functions: Sequence[Any], checkpoint: str) -> None:
    """Go on from the state that RuleStates saved; a checkpoint of TRL's own has none."""
    path = Path(checkpoint) / FILE
    if not path.is_file():
        return
    states = json.loads(path.read_text())
    for rules in _rule_sets(functions):
        if rules.name in states:
            rules.load_state_dict(states[rules.name])


class RuleStates(TrainerCallback):
    """Saves the state of rule sets that have one beside the weights."""

    def __init__(self, functions: Sequence[Any]):
        self.functions = functions

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        states = {rules.name: rules.state_dict() for rules in _rule_sets(self.functions) if rules.normalise}
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if states and state.is_world_process_zero and folder.is_dir():
            (folder / FILE).write_text(json.dumps(states))


def _rule_sets(functions: Sequence[Any]) -> list[RuleSet]:
    return [function for function in functions if isinstance(function, RuleSet)]
