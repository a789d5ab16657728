"""More groups than an update takes are sampled, and groups without variance make way for spares (DAPO).

Completions of a group that all score alike teach nothing: their advantages are 0. DAPO (arXiv 2503.14476, section 3.2)
samples more prompts and keeps those whose groups differ. Here the number of prompts is fixed (`oversample` times as
many), so that a step takes a known time; the update has the size it always had.
"""

import math
from collections.abc import Sequence
from typing import Any

from trl_ext.errors import ConfigError
from trl_ext.trainers.generation.parts import RolloutPart
from trl_ext.trainers.generation.trainer import RolloutTrainer
from trl_ext.trainers.step.exchange import redistribute


def check_oversample(args: Any) -> None:
    """Raise ConfigError where `oversample` cannot be what is asked for.

    Args:
        args: The trainer's config, with batch and processes as they will be.
    """
    oversample, num_groups = getattr(args, "oversample", 1.0), args.generation_batch_size // args.num_generations
    if oversample != 1.0 and num_sampled_groups(args) == num_groups:
        raise ConfigError(
            f"oversample={oversample} gives no spare group of num_generations={args.num_generations} where an update "
            f"has {num_groups}, and {args.world_size} process{'es' if args.world_size > 1 else ''} sample equal "
            f"shares. Set it to {(num_groups + _unit(args)) / num_groups:.4g} or more."
        )


def num_sampled_groups(args: Any) -> int:
    """Return the groups of one generation over all ranks: the nearest to `oversample` that ranks can share equally."""
    num_groups = args.generation_batch_size // args.num_generations
    unit = _unit(args)
    return max(unit * round(getattr(args, "oversample", 1.0) * num_groups / unit), num_groups)


def _unit(args: Any) -> int:
    """Return the smallest number of groups whose rows can be dealt to the ranks in equal shares."""
    return args.world_size // math.gcd(args.num_generations, args.world_size)


def choose(has_variance: Sequence[bool], num_kept: int) -> list[int]:
    """Return the groups that an update takes; spares with variance, in their order, replace groups without.

    Args:
        has_variance: Of every sampled group. The first `num_kept` are the update's own, the others its spares.
        num_kept: Groups of an update.
    """
    spares = [group for group in range(num_kept, len(has_variance)) if has_variance[group]]
    return [group if has_variance[group] or not spares else spares.pop(0) for group in range(num_kept)]


class Oversampling(RolloutPart):
    """Samples more groups than an update takes, and leaves those without variance out.

    Args:
        args: The trainer's config, checked by `check_oversample`.
        has_groups: False for PPO, whose advantages are not relative to groups: no spares are sampled.

    Attributes:
        is_on: True if more groups are sampled than an update takes.
        rows: Rows of one generation on one rank.
    """

    def __init__(self, args: Any, *, has_groups: bool):
        self._args = args
        self.num_groups = args.generation_batch_size // args.num_generations
        self.num_sampled = num_sampled_groups(args) if has_groups else self.num_groups
        self.is_on = self.num_sampled > self.num_groups
        self.rows = self.num_sampled * args.num_generations // args.world_size

    @property
    def as_sampled(self) -> dict[str, int]:
        """The argument by which TRL counts prompts and table rows of a generation, as it is while sampling."""
        return {"generation_batch_size": self.num_sampled * self._args.num_generations} if self.is_on else {}

    def check_rows(self, *, takes_images: bool) -> None:
        """Raise ConfigError where rows that are left out cannot make way for others."""
        if takes_images and self.is_on:
            raise ConfigError(
                f"oversample={self._args.oversample} needs rows that can change ranks, and those with images cannot. "
                "Leave oversample out."
            )

    def after_generation(self, trainer: RolloutTrainer, rollouts: dict[str, Any]) -> dict[str, Any]:
        """Return in training this rank's rows of the groups that the update takes, and log how many were replaced.
        Collective."""
        if not trainer.model.training:
            return rollouts
        has_variance = (~trainer.equal_groups.are_equal).tolist()
        groups = choose(has_variance, self.num_groups)
        size, accelerator = self._args.num_generations, trainer.accelerator
        rows = [group * size + place for group in groups for place in range(size)]
        per_rank = len(rows) // accelerator.num_processes
        kept = redistribute(
            rollouts, [rows[start : start + per_rank] for start in range(0, len(rows), per_rank)], accelerator
        )
        num_tokens = (kept["completion_mask"] * kept.get("tool_mask", 1)).sum()
        kept["num_items_in_batch"] = accelerator.gather(num_tokens).sum()
        trainer.add_metric("oversample/groups_sampled", float(self.num_sampled))
        trainer.add_metric("oversample/groups_replaced", float(sum(group >= self.num_groups for group in groups)))
        num_without = sum(not has_variance[group] for group in groups)
        trainer.add_metric("oversample/groups_without_variance_kept", float(num_without))
        return kept
