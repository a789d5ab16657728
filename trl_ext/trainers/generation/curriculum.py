"""Draw rows by how often their completions pass, instead of uniformly: `curriculum: {target: 0.5}`.

A group has more to learn from if its rewards differ more. If a share p of the completions pass, the variance of the
rewards is p (1 - p): 0 at p = 0 and 1, largest at 0.5. It bounds the policy's improvement from below (arXiv
2504.03380), and gradients are largest there (arXiv 2510.01135). As in arXiv 2507.04632, p is estimated from
completions that are sampled anyway:

    p      = (passed + 2 target) / (tried + 2), both halved before a visit adds to them, so that old visits fade
    weight = exp(-8 KL(target || p)): how likely p passes a share `target` of 8 completions, 1 at the target

Seen rows are drawn by weight. One generation's worth of unseen rows joins the draw, each with weight 1: the more rows
near the target are known, the fewer new rows are tried. Rows are drawn without replacement within a generation.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.utils import logging

from trl_ext.errors import ConfigError, refuse_first
from trl_ext.trainers.checkpoints.ranks import of_rank_0
from trl_ext.trainers.generation.groups import ROUNDING
from trl_ext.trainers.generation.oversampling import num_sampled_groups
from trl_ext.trainers.generation.parts import RolloutPart, Rows
from trl_ext.trainers.generation.trainer import RolloutTrainer

FILE = "curriculum.npz"
# Completions in the exponent of a weight; completions at the target that every row starts with; factor on old counts
# at each visit; generations until some completion must have passed.
_SHARPNESS, _PRIOR, _KEPT, _TRIAL = 8.0, 2.0, 0.5, 20

logger = logging.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class CurriculumSettings:
    """The keys of `curriculum`."""

    target: float = 0.5  # pass rate of the rows that are drawn most, between 0 and 1
    threshold: float = 1.0  # total reward at which a completion passes


def check_curriculum(args: Any) -> CurriculumSettings | None:
    """Return the settings of `curriculum`, parsed from text if needed; None without them.

    Raises:
        ConfigError: An unknown key, an invalid value, or another setting that contradicts it.
    """
    given, known = getattr(args, "curriculum", None), asdict(CurriculumSettings())
    if given is None:
        return None
    if isinstance(given, str):
        with suppress(ValueError):
            args.curriculum = given = json.loads(given)
    if not isinstance(given, Mapping):
        raise ConfigError(f'curriculum={given!r} must be a mapping, such as {{"target": 0.5}}.')
    if unknown := [key for key in given if key not in known]:
        raise ConfigError(f"curriculum has {unknown[0]!r}, which is unknown. Its keys are {', '.join(known)}.")
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not np.isfinite(value):
            raise ConfigError(f"curriculum: {name}={value!r} must be a number.")
    settings = CurriculumSettings(**given)
    refuse_first(
        {
            f"curriculum: target={settings.target} must lie between 0 and 1: a group whose completions all pass, or "
            "none, teaches nothing.": not 0 < settings.target < 1,
            "curriculum draws rows in its own order, and shuffle_dataset=False keeps the data's.": (
                not args.shuffle_dataset
            ),
        }
    )
    return settings


class Curriculum(RolloutPart):
    """Draws the rows of each generation, the same on all processes, and learns from their rewards.

    Args:
        settings: From `check_curriculum`.
        args: The trainer's config.
        dataset: The training rows.

    Raises:
        ConfigError: The dataset is a stream or missing.
    """

    def __init__(self, settings: CurriculumSettings, args: Any, dataset: Any):
        if not hasattr(dataset, "__len__"):
            raise ConfigError("curriculum draws rows by number, and a stream or an environment has no numbers.")
        self._settings, self._args, self._dataset = settings, args, dataset
        self._passed, self._tried = np.zeros(len(dataset)), np.zeros(len(dataset))
        self._num_drawn = 0
        self._ahead: list[int] = []  # drawn, not used yet
        self._now: list[int] = []  # used, without rewards yet

    def look_ahead(self, num_groups: int) -> list[int]:
        """Return the row numbers of the next generation, one per group, from the present pass rates. Collective."""
        if len(self._ahead) != num_groups:  # also if a resumed run has another batch size
            mine = self._draw(num_groups) if self._args.process_index == 0 else []
            self._ahead, self._num_drawn = of_rank_0(self._args, mine), self._num_drawn + 1
        return self._ahead

    def before_generation(self, trainer: RolloutTrainer, rows: Rows) -> Rows:
        """Return, in training, the rows that the curriculum draws. Collective."""
        if not trainer.model.training:
            return rows
        num_groups, num_rows = num_sampled_groups(self._args), len(rows)
        self._now, self._ahead = self.look_ahead(num_groups), []
        size, first = num_rows * self._args.world_size // num_groups, self._args.process_index * num_rows
        return [self._dataset[self._now[place // size]] for place in range(first, first + num_rows)]

    def _draw(self, num_groups: int) -> list[int]:
        dice, target = np.random.default_rng([self._args.seed, self._num_drawn]), self._settings.target
        rate = (self._passed + _PRIOR * target) / (self._tried + _PRIOR)
        divergence = target * np.log(target / rate) + (1 - target) * np.log((1 - target) / (1 - rate))
        # The largest logarithms with Gumbel noise are a draw without replacement.
        places = dice.gumbel(size=len(rate)) - _SHARPNESS * divergence
        places[self._now] = -np.inf
        places[dice.permutation(np.flatnonzero(self._tried == 0))[num_groups:]] = -np.inf
        return [int(row) for row in np.argsort(-places, kind="stable")[:num_groups]]

    def rewarded(self, trainer: RolloutTrainer, totals: torch.Tensor) -> None:
        """Update the pass rates of the drawn rows; a completion without a score has not passed."""
        least = self._settings.threshold - ROUNDING * abs(self._settings.threshold)
        passed = (totals.view(len(self._now), -1) >= least).cpu().numpy()
        rows, self._now = np.array(self._now), []
        unseen_frac = float((self._tried[rows] == 0).mean())
        self._passed[rows] = _KEPT * self._passed[rows] + passed.sum(axis=1)
        self._tried[rows] = _KEPT * self._tried[rows] + passed.shape[1]
        if self._num_drawn == _TRIAL and not self._passed.any() and self._args.process_index == 0:
            logger.warning(
                f"curriculum: no completion of {_TRIAL} generations had a total reward of {self._settings.threshold} "
                "or more, so rows are drawn almost uniformly. Set threshold to the total of a right answer."
            )
        trainer.add_metric("curriculum/pass_rate_mean", float(passed.mean()))
        trainer.add_metric("curriculum/unseen_frac", unseen_frac)

    _STATE = ("passed", "tried", "num_drawn", "ahead")

    def save(self, trainer: RolloutTrainer, folder: str) -> None:
        """Write the state into a checkpoint, on the processes that save."""
        if self._args.should_save:
            state: Any = {name: np.array(getattr(self, f"_{name}")) for name in self._STATE}
            np.savez(Path(folder, FILE), **state)

    def load(self, trainer: RolloutTrainer, checkpoint: str) -> None:
        """Load the state of a checkpoint; raise ConfigError if it has another number of rows."""
        if not Path(checkpoint, FILE).is_file():
            logger.warning(f"{checkpoint} was saved without a curriculum: it begins here, with all rows unseen.")
            return
        with np.load(Path(checkpoint, FILE)) as saved:
            if len(saved["tried"]) != len(self._tried):
                raise ConfigError(
                    f"The curriculum of {checkpoint} knows {len(saved['tried'])} rows by number, and the dataset has "
                    f"{len(self._tried)}. Train on the same rows, or leave curriculum out."
                )
            self._passed, self._tried = saved["passed"], saved["tried"]
            self._num_drawn, self._ahead = int(saved["num_drawn"]), saved["ahead"].tolist()
