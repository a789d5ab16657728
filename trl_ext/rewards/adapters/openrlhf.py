"""Rule sets as OpenRLHF's reward function.

OpenRLHF loads the name `reward_func` of the Python file given as `--reward.remote_url`, calls it as
`reward_func(queries, prompts, labels)` in a thread, and takes `rewards`, `scores` (0 to 1, for dynamic filtering) and
`extra_logs`. Held against OpenRLHF 0.11.0: `SingleTurnAgentExecutor` of `openrlhf/utils/agent.py`, and
`_process_response_into_experience` of `openrlhf/trainer/ppo_utils/samples_generator.py`. A query is prompt and
response decoded together, special tokens included.
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trl_ext.errors import DataError
from trl_ext.rewards.adapters.plain import check_stateless, numbered

# Tokens that end a turn, as chat templates write them, with what padding may follow.
_END = re.compile(r"(?:(?:<\|[a-zA-Z_]{1,40}\|>|</s>|<eos>|<end_of_turn>|<pad>|\[/?PAD\])\s{0,8}){1,8}\Z")


@dataclass(frozen=True, slots=True)
class OpenRLHFReward:
    """OpenRLHF's `reward_func`; `RuleSet.for_openrlhf` makes one.

    Args:
        rules: The RuleSet that judges the completions.
        gold: Column under which rules find a label. Where they read several columns, a label is a JSON object of them.
        as_lists: True returns lists, which JSON can hold; False tensors where torch is loaded, as it is in OpenRLHF.
    """

    rules: Any
    gold: str = "answer"
    as_lists: bool = False

    def __post_init__(self) -> None:
        check_stateless(self.rules, "OpenRLHF")

    def __call__(self, queries: Sequence[str], prompts: Sequence[str], labels: Sequence[Any]) -> dict[str, Any]:
        """Rewards, scores and logs of a batch."""
        if not len(queries) == len(prompts) == len(labels):
            nums = f"{len(queries)} queries, {len(prompts)} prompts and {len(labels)} labels"
            raise DataError(f"There are {nums}. Give one of each per completion.")
        texts = [response_of(query, prompt) for query, prompt in zip(queries, prompts, strict=True)]
        rows = [self._columns(label) for label in labels]
        columns = {name: [row.get(name) for row in rows] for name in self.rules.columns}
        found = [numbered(one, "OpenRLHF") for one in self.rules.explain_all(list(prompts), texts, **columns)]
        judge = next((f"rules/{rule.name}" for rule in self.rules.rules if rule.judges_correctness), "total")
        logs = [name for name in (found[0] if found else {}) if name != "total"]
        return {
            "rewards": self._series([one["total"] for one in found]),
            "scores": self._series([min(max(one[judge], 0.0), 1.0) for one in found]),
            "extra_logs": {name: self._series([one[name] for one in found]) for name in logs},
        }

    def _series(self, numbers: list[float]) -> Any:
        # OpenRLHF wraps what it gets in a tensor again, where a list of one would become a matrix.
        torch = None if self.as_lists else sys.modules.get("torch")
        return numbers if torch is None else torch.tensor(numbers, dtype=torch.float32)

    def _columns(self, label: Any) -> Mapping[str, Any]:
        if isinstance(label, Mapping):
            return label
        if len(self.rules.columns) < 2:
            return dict.fromkeys(self.rules.columns or (self.gold,), label)
        try:
            columns = json.loads(label)
        except (TypeError, ValueError, RecursionError):
            columns = None
        if not isinstance(columns, Mapping):
            names = ", ".join(self.rules.columns)
            raise DataError(f"A label is {label!r:.60}. Write labels as JSON objects with the keys {names}.")
        return columns


def response_of(query: str, prompt: str) -> str:
    """The response within a query: what follows the prompt, without the tokens that end it.

    Raises:
        DataError: The query does not hold the prompt, as where it was cut. Taken whole, it would let rules read the
            prompt's examples as the model's answer.
    """
    start = query.find(prompt)
    if start < 0:
        raise DataError(
            f"The query does not hold its prompt {prompt[:60]!r}, so the response cannot be separated from it. "
            "Raise the longest prompt that OpenRLHF keeps, or leave longer prompts out."
        )
    return _END.sub("", query[start + len(prompt) :])
