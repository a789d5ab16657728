"""Rule sets as verl's custom reward function.

verl loads a function by file and name (`reward.custom_reward_function.path` and `.name`), calls it once a completion
in a thread or in a Ray actor, and takes a float or a mapping with `score`, whose other keys it logs. Held against
verl 0.10.0.dev: `verl/trainer/ppo/reward.py` (`get_custom_reward_fn`), `run_single` in
`verl/experimental/reward_loop/reward_manager/naive.py`, and `verify` in `verl/workers/reward_manager/batch.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trl_ext.errors import DataError
from trl_ext.rewards.adapters.plain import check_stateless, numbered


@dataclass(frozen=True, slots=True)
class VerlReward:
    """verl's `compute_score`; `RuleSet.for_verl` makes one. Pickles, as Ray asks.

    Args:
        rules: The RuleSet that judges the completions.
        gold: Column under which rules find verl's `ground_truth`, unless that is a mapping of columns itself.
    """

    rules: Any
    gold: str = "answer"

    def __post_init__(self) -> None:
        check_stateless(self.rules, "verl")

    def __call__(
        self,
        data_source: Any = None,
        solution_str: Any = None,
        ground_truth: Any = None,
        extra_info: Any = None,
        *,
        data_sources: Any = None,
        solution_strs: Any = None,
        ground_truths: Any = None,
        extra_infos: Any = None,
        reward_router_address: str | None = None,
        reward_model_tokenizer: Any = None,
    ) -> Any:
        """One mapping with `score`, or with the names in the plural, as the batch manager calls, a list of them.

        The rules find the prompt in `extra_info["prompt"]`, and every other key of `extra_info` as a column, as
        well as `data_source`. What verl passes where it runs a reward model of its own has no use here.
        """
        if solution_strs is None:
            return self._scores([data_source], [solution_str], [ground_truth], [extra_info])[0]
        num = len(solution_strs)
        infos = extra_infos if extra_infos is not None else [None] * num
        sources = data_sources if data_sources is not None else [None] * num
        return self._scores(sources, solution_strs, ground_truths, infos)

    def _scores(self, sources: Any, texts: Any, golds: Any, infos: Any) -> list[dict[str, Any]]:
        rows = [self._columns(*row) for row in zip(sources, golds, infos, strict=True)]
        prompts = [row.pop("prompt", None) for row in rows]
        names = dict.fromkeys(name for row in rows for name in row)
        columns = {name: [row.get(name) for row in rows] for name in names}
        found = self.rules.explain_all(prompts, list(texts), **columns)
        numbers = [numbered(one, "verl") for one in found]
        return [{"score": one.pop("total"), **one} for one in numbers]

    def _columns(self, source: Any, gold: Any, info: Any) -> dict[str, Any]:
        """The columns of a row: ground truth, then `extra_info` for what the rules read besides."""
        if info is not None and not isinstance(info, Mapping):
            raise DataError(f"verl's extra_info is a {type(info).__name__}. Give a mapping of column names to values.")
        golds = gold if isinstance(gold, Mapping) else {self.gold: gold}
        return {**(info or {}), "data_source": source, **golds}
