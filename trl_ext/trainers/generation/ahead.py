"""`generation_ahead: 1`: vLLM servers answer the prompts of the next block while this one trains.

A block is what TRL generates at once, for `steps_per_generation * num_iterations` micro-steps. In time order:

    wait      until the answers of block t are there, sampled by the weights before the update of block t-1
    push      TRL pushes the weights of now; the servers are idle, so no completion mixes weights
    generate  TRL asks for the completions of block t, and gets the answers that are there
    ask       for block t+1, whose prompts the sampler's second reader brings: the servers work from here on
    train     on block t

So samples are one block behind the policy that trains on them, which TRL corrects by the ratio of the old policy's
probability to the sampler's (`vllm_importance_sampling_*`). Only process 0 talks to the servers.
"""

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

from transformers.utils import logging

from trl_ext.compat.swap import swapped
from trl_ext.errors import ConfigError, LostProcessError
from trl_ext.trainers.checkpoints.ranks import of_rank_0
from trl_ext.trainers.generation.early import Answers, EarlyScoring, OwnRow, scoring_early
from trl_ext.trainers.generation.parts import RolloutPart
from trl_ext.trainers.generation.trainer import AheadTrainer, RolloutTrainer
from trl_ext.trainers.generation.vllm_servers import PendingGeneration, VLLMClients
from trl_ext.trainers.step.metrics import MetricSample
from trl_ext.trainers.step.rows import counted_tokens

FILE = "ahead.json"
POLL_S = 5.0  # between two looks at servers that answer nothing yet
# Of TRL's ratios: per token, because a sequence's product leaves its bounds once the policy has moved.
MODE, CAP = "token_truncate", 2.0

_TRUNCATED, _SAMPLE_SIZE = "sampling/truncated_frac", "sampling/effective_sample_size"
_MEAN, _SQUARE = "sampling/mean", "sampling/square"

logger = logging.get_logger(__name__)


def choose_correction(args: Any) -> None:
    """Give a config with `generation_ahead: 1` the correction that it needs, where none is set.

    Not when the config is made: a parser passes all settings, and notes afterwards which of them were given.
    """
    if getattr(args, "generation_ahead", 0) and "vllm_importance_sampling_mode" not in args.given:
        args.vllm_importance_sampling_mode = MODE
        if "vllm_importance_sampling_clip_max" not in args.given:
            args.vllm_importance_sampling_clip_max = CAP


def check_ahead(trainer: AheadTrainer, *, takes_images: bool) -> None:
    """Raise ConfigError for a trainer whose next prompts or answers cannot be known ahead."""
    reasons = {
        "a rollout_func, which generates by itself": trainer.rollout_func is not None,
        "tools or environments, whose turns are generated one after the other": bool(trainer.tools),
        "images in prompts": takes_images,
        "a streamed dataset, whose rows have no numbers": not hasattr(trainer.train_dataset, "__len__"),
    }
    for reason, holds in reasons.items():
        if holds:
            raise ConfigError(f"generation_ahead=1 does not work with {reason}. Leave generation_ahead out.")
    if Blocks(trainer).number < 2:
        raise ConfigError(
            "generation_ahead=1 needs two blocks of samples or more, and this run has one: nothing would be generated "
            "ahead. Leave it out, or train longer."
        )


class Blocks:
    """The blocks of a run, by number, with the prompts that TRL's sampler deals to each.

    Args:
        trainer: A GRPO trainer with a dataset whose rows have numbers.
    """

    def __init__(self, trainer: AheadTrainer):
        self._trainer = trainer
        self._offset = 0

    @property
    def _micro_steps(self) -> int:
        return int(self._trainer.args.steps_per_generation * self._trainer.num_iterations)

    @property
    def current(self) -> int:
        """The block that is generated or trained."""
        return int(self._trainer.micro_step + self._offset) // self._micro_steps

    def begin(self, *, is_restored: bool) -> None:
        """Note where a run begins.

        Args:
            is_restored: True where TRL's counter of micro-steps was restored from a checkpoint.
        """
        trainer = self._trainer
        done = trainer.state.global_step * trainer.args.gradient_accumulation_steps
        self._offset = 0 if is_restored else done - trainer.micro_step

    @property
    def number(self) -> int:
        """Blocks of the whole run; the last may be trained in part."""
        args, sampler = self._trainer.args, self._trainer.row_sampler().sampler
        if args.max_steps > 0:
            return -(-args.max_steps * args.gradient_accumulation_steps // self._micro_steps)
        return int(args.num_train_epochs * (sampler.num_samples // sampler.batch_size))

    def rows(self, block: int) -> list[int]:
        """Return the numbers in the dataset of all processes' rows of a block, in order; with a curriculum, which
        knows no other, of the next block. Collective."""
        reader, curriculum = self._trainer.row_sampler(), self._trainer.curriculum
        sampler = reader.sampler
        if curriculum is not None:
            return [row for row in curriculum.look_ahead(sampler.batch_size) for _ in range(sampler.mini_repeat_count)]
        epoch, number = divmod(block, sampler.num_samples // sampler.batch_size)
        reader.set_epoch(epoch)
        num_rows = sampler.batch_size * sampler.mini_repeat_count
        first = number * num_rows * sampler.repeat_count
        return list(islice(reader, first, first + num_rows))


class GenerationAhead(RolloutPart):
    """Keeps the answers of the next block under way.

    Args:
        trainer: A GRPO trainer, made, with `generation_ahead: 1`.
        takes_images: True where its rows or tools may bring images.
    """

    def __init__(self, trainer: AheadTrainer, *, takes_images: bool):
        check_ahead(trainer, takes_images=takes_images)
        self._trainer = trainer
        self.blocks = Blocks(trainer)
        self._answers: list[Answers] = []
        self._early: EarlyScoring | None = None

    @property
    def _client(self) -> VLLMClients | None:
        """The client on process 0, which alone has any."""
        return getattr(self._trainer.vllm_generation, "vllm_client", None)

    @contextmanager
    def generating(self, trainer: RolloutTrainer) -> Iterator[None]:
        """Let TRL push weights and generate inside the block, while the servers do nothing else; in training the
        next block's prompts are sent after it."""
        client, is_training = self._client, trainer.model.training
        if client is not None:
            self._wait(client)
        self._find_servers(client)
        with nullcontext() if client is None else swapped(client, takes_pending=is_training):
            yield
        if is_training:
            early = self._early
            self._ask(client)  # before the wait for verdicts: the servers work meanwhile
            if early is not None:
                early.remember()
            if self._early is not None:
                self._early.start()

    def _wait(self, client: VLLMClients) -> None:
        """Wait for the servers' answers, or until they are known not to come."""
        asked, patience_s = client.pending, self._trainer.args.vllm_server_timeout
        if asked is None:
            return
        with self._trainer.clock.phase("generate_wait"):
            last_s = time.monotonic()
            while not asked.is_there(POLL_S):
                last_s = time.monotonic() if client.is_up() else last_s
                if time.monotonic() - last_s > patience_s:
                    asked.end(None, TimeoutError(f"no server for {patience_s:.0f} s"))

    def _find_servers(self, client: VLLMClients | None) -> None:
        """Join servers again that were lost since the last block; TRL then pushes the weights of now. Collective.

        Completions that they owed are generated by those.

        Raises:
            LostProcessError: They do not come back.
        """
        trainer, args = self._trainer, self._trainer.args
        has_failed = client is not None and client.pending is not None and client.pending.has_failed
        is_lost = client is not None and (client.is_lost or has_failed or not client.is_up())
        if not of_rank_0(args, is_lost):
            return
        problem = ""
        if client is not None:
            logger.warning(f"A vLLM server was lost by step {trainer.state.global_step}. Waiting until it is back.")
            client.pending = None if has_failed else client.pending
            problem = client.connect_again(trainer.accelerator.device, args.vllm_server_timeout)
        problem = of_rank_0(args, problem)
        if problem:
            advice = "Start it, and then the run with resume_from_checkpoint=True."
            raise LostProcessError(f"{problem} {advice}", says=trainer.is_world_process_zero())
        trainer.push_again()

    def _ask(self, client: VLLMClients | None) -> None:
        """Send the prompts of the next block, whose completions may be scored as they come. Collective."""
        trainer, now, following = self._trainer, self._trainer.state.global_step, self.blocks.current + 1
        if client is not None and client.pending is not None:
            logger.warning(
                f"Completions that were generated ahead are thrown away at step {now}: their prompts or sampling "
                "are not those of the batch. The batch was generated by the weights of now."
            )
            client.pending = None
        given = None if client is None else client.last_result
        known = (0, None) if given is None else (now - given.version, given.seconds)
        num_behind, seconds = of_rank_0(trainer.args, known)
        trainer.add_metric("sampling/steps_behind", float(num_behind))
        if seconds is not None:
            trainer.add_metric("sampling/generation_s", seconds)
        self._early = None
        if following >= self.blocks.number:
            return
        rows, size, data = self.blocks.rows(following), trainer.num_generations, trainer.train_dataset
        assert size is not None, "GRPOConfig has filled it in."
        self._answers = [*self._answers, Answers(following, len(rows) // size)]
        if len(self._answers) > 2:  # processes may still read the last block
            self._answers.pop(0).forget()
        per_rank, rank = len(rows) // trainer.args.world_size, trainer.args.process_index
        places = range(rank * per_rank, per_rank * (rank + 1))
        own = [OwnRow(place // size, place % size, data[rows[place]]) for place in places]
        self._early = scoring_early(trainer, own, self._answers[-1])
        if client is not None and not client.is_lost:
            ids = trainer.token_ids([data[row]["prompt"] for row in rows[::size]])
            client.submit(ids, now, None if self._early is None else self._answers[-1].give)

    def after_loss(self, trainer: RolloutTrainer, inputs: dict[str, Any]) -> None:
        """Note how far the samples of a forward are from the policy's, of which TRL's ratios are made."""
        mask = counted_tokens(inputs).bool()
        if "sampling_per_token_logps" not in inputs:  # rows of the rehearsal
            return
        cap = self._trainer.vllm_importance_sampling_clip_max or math.inf
        log_ratio = inputs["old_per_token_logps"].detach() - inputs["sampling_per_token_logps"]
        ratio = log_ratio.nan_to_num(0.0)[mask].exp()
        moments = {_TRUNCATED: ratio > cap, _MEAN: ratio.clamp(max=cap), _SQUARE: ratio.clamp(max=cap) ** 2}
        for name, values in moments.items():
            mean = values.float().sum() / mask.sum().clamp(min=1)
            self._trainer.counts.samples.append(MetricSample(name, mean, mask.sum()))

    def step_metrics(self, values: dict[str, float]) -> dict[str, float]:
        """Put Kish's effective sample size, as a share of the tokens, in place of the ratios' moments."""
        mean, square = values.pop(_MEAN, None), values.pop(_SQUARE, None)
        if mean is not None and square:
            values[_SAMPLE_SIZE] = mean**2 / square
        return values

    def save(self, trainer: RolloutTrainer, folder: str) -> None:
        """Write the answers of the next block into a checkpoint, when they are there."""
        if self._client is not None and self._client.pending is not None:
            self._wait(self._client)
            if not self._client.pending.has_failed:
                (Path(folder) / FILE).write_text(json.dumps(self._client.pending.state_dict()), encoding="utf-8")

    def begin(self, trainer: RolloutTrainer, checkpoint: str | None, *, has_rollouts: bool) -> None:
        """Note where a run begins, and take the answers of its next block out of the checkpoint."""
        self.blocks.begin(is_restored=has_rollouts)
        path = Path(checkpoint or "") / FILE
        if self._client is not None and has_rollouts and path.is_file():
            self._client.pending = PendingGeneration.from_state(json.loads(path.read_text(encoding="utf-8")))
