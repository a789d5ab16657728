"""Rows that are generated ahead are scored as their completions come, while the block before them trains.

Process 0 gets the completions. The others get those of their rows through the store by which the processes have met:
a thread may ask it at any time, where a collective would have to wait for the update.
"""

import copy
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import Any

import torch.distributed as dist

from trl_ext.compat.distributed import meeting_store
from trl_ext.errors import TrlExtError
from trl_ext.rewards import RuleSet
from trl_ext.rewards.base.rows import as_columns
from trl_ext.rewards.totals.scorer import Early
from trl_ext.trainers.generation.trainer import RolloutTrainer

POLL_S = 0.05
_KEY = "trl_ext/ahead"


@dataclass(frozen=True)
class OwnRow:
    """A row of this process in a block."""

    prompt: int  # number of its prompt among the block's
    place: int  # number of its completion among those of the prompt
    columns: Mapping[str, Any]  # of the dataset


class Answers:
    """Completions of one block on their way from process 0 to the processes whose rows they are.

    Args:
        block: Number of the block.
        num_prompts: Its prompts.
    """

    def __init__(self, block: int, num_prompts: int):
        self._num_prompts = num_prompts
        self._prefix = f"{_KEY}/{block}"
        self._here: SimpleQueue[tuple[int, list[list[int]]]] = SimpleQueue()
        self._store = meeting_store() if dist.is_initialized() and dist.get_world_size() > 1 else None
        self._is_main = self._store is None or dist.get_rank() == 0
        self.has_ended = Event()

    def give(self, prompt: int, completions: list[list[int]]) -> None:
        """Pass on the completions of a prompt; called on process 0, by any thread."""
        self._here.put((prompt, completions))
        if self._store is not None:
            self._store.set(f"{self._prefix}/{prompt}", json.dumps(completions))

    def of(self, prompts: set[int]) -> Iterator[tuple[int, list[list[int]]]]:
        """Yield the completions of prompts as they come, until all have come or nobody waits any more."""
        left = set(prompts)
        while left and not self.has_ended.is_set():
            for prompt, completions in [self._next()] if self._is_main else self._found(left):
                if prompt in left:
                    left.discard(prompt)
                    yield prompt, completions

    def forget(self) -> None:
        """Take the completions out of the store, when no process reads them any more."""
        if self._store is not None and self._is_main:
            for prompt in range(self._num_prompts):
                self._store.delete_key(f"{self._prefix}/{prompt}")

    def _next(self) -> tuple[int, list[list[int]]]:
        try:
            return self._here.get(timeout=POLL_S)
        except Empty:
            return -1, []

    def _found(self, prompts: set[int]) -> list[tuple[int, list[list[int]]]]:
        assert self._store is not None
        keys = {prompt: f"{self._prefix}/{prompt}" for prompt in prompts}
        there = [prompt for prompt, key in keys.items() if self._store.check([key])]
        if not there:
            time.sleep(POLL_S)
        return [(prompt, json.loads(self._store.get(keys[prompt]))) for prompt in there]


class EarlyScoring:
    """Rule sets judge rows of the next block in a thread, as their completions come.

    The verdicts are remembered. A row whose verdict is not there, or whose rule raised, is judged when TRL asks.

    Args:
        rule_sets: Those with rules that run elsewhere.
        rows: This process's rows of the block, in order.
        answers: Brings the completions.
        decode: Makes token ids of completions into texts. Called in the thread.
    """

    def __init__(
        self,
        rule_sets: Sequence[RuleSet],
        rows: Sequence[OwnRow],
        answers: Answers,
        decode: Callable[[list[list[int]]], list[str]],
    ):
        self._rule_sets, self._answers, self._decode = rule_sets, answers, decode
        self._of_prompt = {number: list(own) for number, own in groupby(rows, key=lambda row: row.prompt)}
        self._begun: list[tuple[RuleSet, Early]] = []
        self._thread = Thread(target=self._run, name="early_scoring", daemon=True)

    def start(self) -> None:
        """Begin with the completions that are there."""
        self._thread.start()

    def remember(self) -> None:
        """Wait until what has begun is judged, and remember the verdicts."""
        self._answers.has_ended.set()
        self._thread.join()
        for rules, early in self._begun:
            rules.remember(early)

    def _run(self) -> None:
        for prompt, completions in self._answers.of(set(self._of_prompt)):
            own = self._of_prompt[prompt]
            ids = [completions[row.place] for row in own]
            columns = as_columns([row.columns for row in own], own[0].columns)
            prompts = columns.pop("prompt")
            texts: list[Any] = self._decode(ids)
            if not isinstance(prompts[0], str):
                texts = [[{"role": "assistant", "content": text}] for text in texts]
            for rules in self._rule_sets:
                self._make_room(rules, len(own))
                with suppress(TrlExtError):  # said when TRL asks
                    self._begun.append((rules, rules.begin(prompts, texts, ids, **columns)))

    def _make_room(self, rules: RuleSet, num_rows: int) -> None:
        """Wait for the oldest rows while so many more would be too many at once."""
        begun = [early for one, early in self._begun if one is rules]
        most = rules.rows_at_once - num_rows
        while begun and sum(len(early.rows) for early in begun) > most:
            begun.pop(0).wait()


def scoring_early(trainer: RolloutTrainer, rows: Sequence[OwnRow], answers: Answers) -> EarlyScoring | None:
    """Return what scores a block's rows early; None where no rule can be, or where a template parses completions."""
    rule_sets = [one for one in trainer.reward_funcs if isinstance(one, RuleSet) and one.rows_at_once]
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    parses = any(getattr(tokenizer, name, None) is not None for name in ("response_template", "response_schema"))
    if not rule_sets or parses:
        return None
    decode = partial(copy.deepcopy(tokenizer).batch_decode, skip_special_tokens=True)  # a tokenizer is of one thread
    return EarlyScoring(rule_sets, rows, answers, decode)
