"""The critics: how each is attached to the actor, which model returns its values, and which optimizer trains it.

adapter    a second LoRA and a value head on the actor's frozen backbone; one forward each, one backward for both
head       a value head on the actor's hidden states; one forward for both
separate   another model with its own optimizer, under DeepSpeed with its own engine; trained after the actor
none       for advantage estimators that need no values
"""

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback, set_seed

from trl_ext.compat import deepspeed
from trl_ext.compat.peft import add_adapter, base_model, copy_adapter
from trl_ext.errors import ConfigError
from trl_ext.packing.check import CheckResult
from trl_ext.trainers.checkpoints.trainer import all_loaded, load_pretrained
from trl_ext.trainers.fit.rehearsal.state import random_numbers_restored
from trl_ext.trainers.forward.checkpointing import enable_checkpointing
from trl_ext.trainers.forward.gradient_sync import gradients_unsynced
from trl_ext.trainers.forward.roles import CRITIC, REWARD, Roles, pin_roles, reward_role
from trl_ext.trainers.forward.value_head import add_token_values, add_value_head, run_in_fp32
from trl_ext.trainers.grpo.trainer import GRPOTrainer
from trl_ext.trainers.ppo.critic import files as critic_files
from trl_ext.trainers.ppo.critic.schedule import OF_CRITIC, Factor
from trl_ext.trainers.ppo.scores.reward_adapter import load_reward_adapter
from trl_ext.trainers.settings.checks import check_grad_norm
from trl_ext.trainers.step.forward import Forward, PrefixBackward
from trl_ext.trainers.step.run import ForwardLoop
from trl_ext.trainers.step.self_check import check_causal_model


class Critic:
    """The interface of the critics; an instance has no weights and is used if advantages need no values.

    Attributes:
        name: "adapter", "head", "separate" or "none".
        comes_with_log_probs: True if the actor's forward returns values as well.
        has_separate_forward: True if its values come from another forward of the actor's model.
        is_trained_with_actor: True if the actor's optimizer trains the critic, too.
        num_passes: Forwards of each row that it adds to an update.
        rate_ratio: Its learning rate over the actor's; None if the actor's optimizer has both.
        factor: Factor of the learning rate by step, if it differs from the actor's.
    """

    name = "none"
    comes_with_log_probs = False
    has_separate_forward = False
    is_trained_with_actor = False
    num_passes = 0
    rate_ratio: float | None = None
    factor: Factor | None = None

    @property
    def has_values(self) -> bool:
        """True unless there is no critic at all."""
        return self.name != "none"

    @property
    def is_ready(self) -> bool:
        """True once values can be asked for."""
        return self.has_values

    def model(self, actor: Any) -> Any:
        """Return the model to call for values, given the actor as it is called now."""
        return actor

    def models(self) -> list[Any]:
        """Return the critic's models that forward flat rows, unwrapped; none if it shares the actor's."""
        return []

    def self_check(self, result: CheckResult) -> CheckResult:
        """Return the result of packing's self-check, given the actor's; a separate critic is checked, too."""
        return result

    def after_rollout(self) -> None:
        """Undo changes that the reference's forward made to the actor."""

    def train_on(
        self,
        forwards: Sequence[Forward],
        loop: ForwardLoop,
        loss_of: Callable[[Any], torch.Tensor],
        loss: torch.Tensor,
    ) -> torch.Tensor:
        """Train a separate critic on the actor's forwards of a micro-step; return [] `loss` with its loss added.

        Args:
            forwards: They run one by one, each with its backward.
            loop: Splits a forward if memory runs out.
            loss_of: Returns the loss of a forward's batch.
            loss: [] of the actor, detached.
        """
        return loss

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return the trained weights."""
        return []

    def gathered(self, state_dict: dict[str, Any] | None) -> dict[str, Any]:
        """Return the unsharded weights to save that PEFT does not save. Collective under ZeRO-3."""
        return {}

    def save(self, output_dir: str, weights: dict[str, Any]) -> None:
        """Write gathered weights into the actor's folder."""

    def load(self, checkpoint: str) -> None:
        """Load the weights of a checkpoint."""

    def save_training_state(self, checkpoint: str) -> None:
        """Write the optimizer of a separate critic. Collective under DeepSpeed."""

    def resume_from(self, checkpoint: str) -> None:
        """Let a separate critic load its optimizer from a checkpoint."""


class HeadCritic(Critic):
    """A value head on the actor's hidden states; it starts from a reward model's `score`, or at zero for None."""

    name = "head"
    comes_with_log_probs = True
    is_trained_with_actor = True

    def __init__(self, trainer: GRPOTrainer, score: torch.nn.Linear | None = None):
        model = base_model(trainer.model)
        self.head = add_value_head(model, dtype=_head_dtype(trainer, model))
        if score is not None:
            start_from(self.head, score)

    def parameters(self) -> list[torch.nn.Parameter]:
        return list(self.head.parameters())

    def gathered(self, state_dict: dict[str, Any] | None) -> dict[str, Any]:
        return critic_files.value_head_of(state_dict, self.head)

    def save(self, output_dir: str, weights: dict[str, Any]) -> None:
        save_file(weights, Path(output_dir) / critic_files.FOLDER / critic_files.SCORE)

    def load(self, checkpoint: str) -> None:
        weights = load_file(Path(checkpoint) / critic_files.FOLDER / critic_files.SCORE)
        critic_files.load_head(self.head, weights)


def start_from(head: torch.nn.Linear, score: torch.nn.Linear) -> None:
    """Copy a reward model's score; ConfigError for another hidden size, or if ZeRO-3 has sharded the weights."""
    if score.weight.numel() == 0:
        raise ConfigError(
            "critic_init='reward' cannot read the score of a reward model that ZeRO-3 has divided. Use ZeRO-2, or "
            "critic='separate'."
        )
    if score.weight.shape != head.weight.shape:
        raise ConfigError(
            f"critic_init='reward': the reward model has hidden size {score.in_features}, the policy "
            f"{head.in_features}: another backbone. Give a reward model of the policy's base model, or leave "
            "critic_init out."
        )
    with torch.no_grad():
        head.weight.copy_(score.weight)
        if score.bias is not None:
            head.bias.copy_(score.bias)


class AdapterCritic(HeadCritic):
    """A second LoRA and a value head on the actor's frozen backbone.

    Args:
        trainer: The trainer of the actor.
        reward_adapters: Folders of LoRA reward models on the same backbone.
        disable_dropout: No dropout in the critic's LoRA.
        starts_from_reward: The critic starts as a copy of the first reward adapter, its rank and its score included.
    """

    name = "adapter"
    comes_with_log_probs = False
    has_separate_forward = True
    num_passes = 1

    def __init__(
        self,
        trainer: GRPOTrainer,
        reward_adapters: Sequence[str] = (),
        *,
        disable_dropout: bool = True,
        starts_from_reward: bool = False,
    ):
        model: Any = trainer.model
        self._peft_model = model
        self._actor = model.active_adapter
        folders = {reward_role(i): folder for i, folder in enumerate(reward_adapters)}
        reward_heads: dict[str, Any] = {}
        try:
            reward_heads |= ((role, load_reward_adapter(model, folder, role)) for role, folder in folders.items())
        except ConfigError:
            for role in set(folders) & set(model.peft_config):  # of the user's model, who may try again
                model.delete_adapter(role)
            raise
        config = copy.deepcopy(model.peft_config[REWARD if starts_from_reward else self._actor])
        config.inference_mode = False
        if disable_dropout:
            config.lora_dropout = 0.0
        elif starts_from_reward:
            config.lora_dropout = model.peft_config[self._actor].lora_dropout
        # TRL seeds each process differently; DDP and DeepSpeed would use process 0's draw, FSDP a part of each.
        with random_numbers_restored():
            set_seed(trainer.args.seed)
            add_adapter(model, CRITIC, config)
        if starts_from_reward:
            copy_adapter(model, REWARD, CRITIC)
        self.roles = Roles(model, {role: role for role in (CRITIC, *reward_heads)})
        base = model.get_base_model()
        self.head = add_value_head(base, self.roles, _head_dtype(trainer, base))
        for role, reward_head in reward_heads.items():
            # The model then returns this head's score of every token, as `token_values`, for `role=role`.
            base.role_heads[role] = f"{role}_head"
            base.add_module(f"{role}_head", run_in_fp32(reward_head.to(self.head.weight.dtype)))
        if starts_from_reward:
            start_from(self.head, reward_heads[REWARD])
        pin_roles(base, self.roles, trainer.args.gradient_checkpointing_kwargs)
        self.after_rollout()

    def after_rollout(self) -> None:
        # PEFT freezes every adapter that is not active whenever it switches.
        self._peft_model.set_requires_grad([self._actor, CRITIC], requires_grad=True)

    def parameters(self) -> list[torch.nn.Parameter]:
        adapter = [p for n, p in self._peft_model.named_parameters() if CRITIC in n.split(".")]
        return adapter + list(self.head.parameters())

    def save(self, output_dir: str, weights: dict[str, Any]) -> None:
        rewards = [name for name in self._peft_model.base_model.model.role_heads if name != CRITIC]
        critic_files.complete_adapter(output_dir, weights, rewards)

    def load(self, checkpoint: str) -> None:
        critic_files.load_adapter(checkpoint, self._peft_model, self.head)
        self.after_rollout()


class SeparateCritic(Critic):
    """A separate model with its own optimizer; under DeepSpeed with its own engine.

    Actor and critic run backward in turn, so that the activations of both are never in memory together.

    Args:
        trainer: The trainer of the actor.
        value_model: Sequence classification model with one label.
        learning_rate: Initial learning rate; it follows the actor's schedule. None for the actor's.

    Attributes:
        bare: The value model.
        wrapped: The value model as accelerate or DeepSpeed wrapped it when training began.
        optimizer: None before training.
    """

    name = "separate"
    num_passes = 1
    rate_ratio: float

    def __init__(self, trainer: GRPOTrainer, value_model: Any, learning_rate: float | None = None):
        self._trainer = trainer
        if learning_rate and not trainer.args.learning_rate:
            raise ConfigError(
                f"value_learning_rate={learning_rate} has no effect with learning_rate=0, whose schedule a separate "
                "critic follows. Set critic_warmup_steps, in which the actor waits, or leave value_learning_rate out."
            )
        self._learning_rate = learning_rate
        self._checkpoint: str | None = None
        self.bare = value_model
        add_token_values(value_model, keep_dtype=trainer.is_deepspeed_enabled)
        if trainer.args.gradient_checkpointing:
            options = trainer.args.gradient_checkpointing_kwargs or {"use_reentrant": False}
            enable_checkpointing(value_model, options)
        if not trainer.is_deepspeed_enabled:
            value_model.to(trainer.accelerator.device)
        self.wrapped: Any = value_model
        self.optimizer: Any = None

    @property
    def is_ready(self) -> bool:
        """False before training under DeepSpeed, whose engine moves the weights to the device."""
        return self.optimizer is not None or not self._trainer.is_deepspeed_enabled

    def model(self, actor: Any) -> Any:
        return self.wrapped

    def parameters(self) -> list[torch.nn.Parameter]:
        return [p for p in self.bare.parameters() if p.requires_grad]

    def prepare(self) -> None:
        """Wrap the model and make its optimizer, after the actor's; load a checkpoint if there is any."""
        trainer = self._trainer
        cls, options = trainer.get_optimizer_cls_and_kwargs(trainer.args, self.bare)
        options["lr"] = self._learning_rate or trainer.args.learning_rate
        self.rate_ratio = options["lr"] / trainer.args.learning_rate if options["lr"] else 1.0
        if self._checkpoint is not None:  # the actor's learning rate is the checkpoint's by now
            self.rate_ratio = critic_files.read_state(self._checkpoint)["rate_ratio"]
        names = set(trainer.get_decay_parameter_names(self.bare))  # without biases and norms
        trained = [(n, p) for n, p in self.bare.named_parameters() if p.requires_grad]
        decayed = {"params": [p for n, p in trained if n in names], "weight_decay": trainer.args.weight_decay}
        others = {"params": [p for n, p in trained if n not in names], "weight_decay": 0.0}
        optimizer = cls([decayed, others], **options)
        if trainer.is_deepspeed_enabled:
            self.wrapped = deepspeed.make_engine(self.bare, optimizer, trainer.accelerator, trainer.args.max_grad_norm)
            self.optimizer = self.wrapped.optimizer
        else:
            self.wrapped = trainer.accelerator.prepare_model(self.bare)
            self.optimizer = trainer.accelerator.prepare_optimizer(optimizer)
        # `from_pretrained` returns a model in evaluation mode, in which nothing is checkpointed.
        self.wrapped.train()
        if self._checkpoint is None:
            return
        folder = Path(self._checkpoint) / critic_files.FOLDER
        if trainer.is_deepspeed_enabled:
            self.wrapped.load_checkpoint(str(folder / "engine"))
        else:
            # The optimizer moves its state to the device of its parameters.
            state = torch.load(folder / critic_files.OPTIMIZER, map_location="cpu", weights_only=True)
            self.optimizer.load_state_dict(state)

    def models(self) -> list[Any]:
        return [self.bare]

    def self_check(self, result: CheckResult) -> CheckResult:
        if not result.is_exact:
            return result
        was_training = self.bare.training
        self.wrapped.eval()
        options = self._trainer.check_options(self.bare)
        own = check_causal_model(self.wrapped, **options, of_critic=True, reader=self._trainer.image_reader)
        self.wrapped.train(was_training)
        return replace(own, alone=torch.cat([result.alone, own.alone]))

    def train_on(
        self,
        forwards: Sequence[Forward],
        loop: ForwardLoop,
        loss_of: Callable[[Any], torch.Tensor],
        loss: torch.Tensor,
    ) -> torch.Tensor:
        """Overrides Critic.train_on: steps at the end of an accumulation, as the actor does."""
        accelerator, losses = self._trainer.accelerator, []

        def attempt(forward: Forward, is_last: bool) -> None:
            with nullcontext() if is_last else gradients_unsynced(accelerator, self.wrapped):
                # DeepSpeed counts micro-batches itself; DDP averages gradients over ranks after the last micro-batch.
                is_synced = accelerator.sync_gradients or self._trainer.is_deepspeed_enabled
                with nullcontext() if is_synced else accelerator.no_sync(self.wrapped):
                    own = forward.loss(lambda batch: loop.forward(self.wrapped, lambda: loss_of(batch)))
                    self.backward_and_step(own)
            losses.append(own.detach())

        loop.run("critic", [one for one in forwards if not isinstance(one, PrefixBackward)], attempt)
        return loss + sum(losses, start=torch.zeros((), device=accelerator.device))

    def backward_and_step(self, loss: torch.Tensor) -> None:
        """Run backward, and at the end of an accumulation step, at the actor's place in its schedule."""
        accelerator = self._trainer.accelerator
        schedule: Any = self._trainer.lr_scheduler
        learning_rate = schedule.get_last_lr()[0] * self.rate_ratio
        if self.factor is not None:  # the initial rate times the critic's factor, at the actor's place in the run
            inner = getattr(schedule, "scheduler", schedule)
            learning_rate = inner.base_lrs[0] * self.rate_ratio * self.factor(inner.last_epoch)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.backward(loss)
        if accelerator.sync_gradients and not self._trainer.is_deepspeed_enabled:
            norm = accelerator.clip_grad_norm_(self.bare.parameters(), self._trainer.args.max_grad_norm or math.inf)
            check_grad_norm(self._trainer, norm, "critic's ")
            self.optimizer.step()
            self.optimizer.zero_grad()
        elif accelerator.sync_gradients:
            check_grad_norm(self._trainer, self.wrapped.get_global_grad_norm(), "critic's ")

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward only; under DeepSpeed the engine also steps at the end of an accumulation."""
        accelerator = self._trainer.accelerator
        if self._trainer.is_deepspeed_enabled:
            deepspeed.backward(self.wrapped, loss, is_last=accelerator.sync_gradients)
        else:
            accelerator.backward(loss)

    def gathered(self, state_dict: dict[str, Any] | None) -> dict[str, Any]:
        return self._trainer.accelerator.get_state_dict(self.wrapped)

    def save(self, output_dir: str, weights: dict[str, Any]) -> None:
        self.bare.save_pretrained(Path(output_dir) / critic_files.FOLDER, state_dict=weights)

    def load(self, checkpoint: str) -> None:
        folder = Path(checkpoint) / critic_files.FOLDER
        with all_loaded(self.bare, folder):
            load_pretrained(self.bare, folder)

    def save_training_state(self, checkpoint: str) -> None:
        if self._trainer.is_deepspeed_enabled:
            self.wrapped.save_checkpoint(str(Path(checkpoint) / critic_files.FOLDER / "engine"))
        elif self._trainer.args.should_save:
            torch.save(self.optimizer.state_dict(), Path(checkpoint) / critic_files.FOLDER / critic_files.OPTIMIZER)

    def resume_from(self, checkpoint: str) -> None:
        self._checkpoint = checkpoint


@dataclass(eq=False)
class CriticStarts(TrainerCallback):
    """Callback that prepares a separate critic once the actor's optimizer and schedule exist."""

    critic: SeparateCritic

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.critic.prepare()


def _head_dtype(trainer: GRPOTrainer, model: Any) -> torch.dtype:
    # ZeRO-3 may have split the model at load time, and another dtype would stop DeepSpeed.
    return model.dtype if trainer.is_deepspeed_enabled else torch.float32


def split_group(optimizer: Any, critic: Critic, learning_rate: float) -> None:
    """Move the critic's parameters in the actor's optimizer, which has no state yet, into groups of this rate."""
    of_critic = {id(p) for p in critic.parameters()}
    for group in list(optimizer.param_groups):
        own = [p for p in group["params"] if id(p) in of_critic]
        if own:
            group["params"] = [p for p in group["params"] if id(p) not in of_critic]
            optimizer.add_param_group(group | {"params": own, "lr": learning_rate, OF_CRITIC: True})
