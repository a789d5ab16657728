"""The three critics: how each is attached to the actor, which model is called for its values, and what trains it.

adapter    a second LoRA and a value head on the actor's frozen backbone; one forward each, one backward for both
head       a value head on the actor's hidden states; one forward for both
separate   a model of its own with its own optimizer, under DeepSpeed with its own engine; trained after the actor
"""

import copy
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model

from trl_ext.compat import deepspeed
from trl_ext.errors import ConfigError
from trl_ext.trainers.forward.roles import CRITIC, REWARD, Roles, pin_roles
from trl_ext.trainers.forward.value_head import add_reward_head, add_token_values, add_value_head
from trl_ext.trainers.ppo.critic import files as critic_files
from trl_ext.trainers.ppo.scores.reward_adapter import load_reward_adapter


class HeadCritic:
    """A value head on the actor's hidden states."""

    name = "head"
    comes_with_log_probs = True
    is_trained_with_actor = True

    def __init__(self, trainer: Any):
        model = trainer.model.get_base_model() if is_peft_model(trainer.model) else trainer.model
        self.head = add_value_head(model, dtype=_head_dtype(trainer, model))

    def model(self, actor: Any) -> Any:
        """What to call for values, given how the actor is called."""
        return actor

    def after_rollout(self) -> None:
        """Undo what the reference pass has left behind."""

    def parameters(self) -> list[torch.nn.Parameter]:
        return list(self.head.parameters())

    def gathered(self, state_dict: dict[str, Any] | None) -> dict[str, Any]:
        """The critic's weights beyond what PEFT saves. Collective."""
        return critic_files.value_head_of(state_dict, self.head)

    def save(self, output_dir: str, weights: dict[str, Any]) -> None:
        critic_files.write_head(output_dir, weights)

    def load(self, checkpoint: str) -> None:
        critic_files.load_head(checkpoint, self.head)

    def save_training_state(self, checkpoint: str) -> None:
        """Nothing: the trainer's optimizer trains this critic, too."""


class AdapterCritic(HeadCritic):
    """A second LoRA and a value head on the actor's frozen backbone."""

    name = "adapter"
    comes_with_log_probs = False

    def __init__(self, trainer: Any, reward_adapter: str | None = None):
        self._peft_model = model = trainer.model
        self._actor = model.active_adapter
        config = copy.deepcopy(model.peft_config[self._actor])
        if trainer.args.disable_dropout:
            config.lora_dropout = 0.0
        model.add_adapter(CRITIC, config)
        reward_head = None if reward_adapter is None else load_reward_adapter(model, reward_adapter, REWARD)
        self.roles = Roles(model, {CRITIC: CRITIC, REWARD: REWARD})
        base = model.get_base_model()
        self.head = add_value_head(base, self.roles, _head_dtype(trainer, base))
        if reward_head is not None:
            add_reward_head(base, reward_head)
        pin_roles(base, self.roles)
        self.after_rollout()

    def after_rollout(self) -> None:
        # PEFT freezes every adapter that is not active whenever it switches.
        self._peft_model.set_requires_grad([self._actor, CRITIC], requires_grad=True)

    def parameters(self) -> list[torch.nn.Parameter]:
        adapter = [p for n, p in self._peft_model.named_parameters() if f".{CRITIC}." in n]
        return adapter + list(self.head.parameters())

    def save(self, output_dir: str, weights: dict[str, Any]) -> None:
        critic_files.complete_adapter(output_dir, weights)

    def load(self, checkpoint: str) -> None:
        critic_files.load_adapter(checkpoint, self._peft_model, self.head)
        self.after_rollout()


class SeparateCritic:
    """A model of its own, with its own optimizer; under DeepSpeed with its own engine.

    Actor and critic run backward one after the other, so that the activations of one are gone when the other's come.
    """

    name = "separate"
    comes_with_log_probs = False
    is_trained_with_actor = False

    def __init__(self, trainer: Any, value_model: Any):
        self._trainer = trainer
        self.bare = value_model
        self.head = add_token_values(value_model, keep_dtype=trainer.is_deepspeed_enabled)
        if trainer.args.gradient_checkpointing:
            options = trainer.args.gradient_checkpointing_kwargs or {"use_reentrant": False}
            value_model.gradient_checkpointing_enable(options)
        if not trainer.is_deepspeed_enabled:
            value_model.to(trainer.accelerator.device)
        self.wrapped: Any = value_model
        self.optimizer: Any = None

    def model(self, actor: Any) -> Any:
        return self.wrapped

    def after_rollout(self) -> None:
        pass

    def parameters(self) -> list[torch.nn.Parameter]:
        return [p for p in self.bare.parameters() if p.requires_grad]

    def prepare(self) -> None:
        """Wrap the model and make its optimizer, when the actor's are there."""
        trainer = self._trainer
        cls, options = trainer.get_optimizer_cls_and_kwargs(trainer.args, self.bare)
        options["lr"] = trainer.args.value_learning_rate or trainer.args.learning_rate
        optimizer = cls(_decay_groups(trainer, self.bare), **options)
        if trainer.is_deepspeed_enabled:
            self.wrapped = deepspeed.make_engine(self.bare, optimizer, trainer.accelerator)
            self.optimizer = self.wrapped.optimizer
        else:
            self.wrapped = trainer.accelerator.prepare_model(self.bare)
            self.optimizer = trainer.accelerator.prepare_optimizer(optimizer)
        # What `from_pretrained` returns is in evaluation mode, in which nothing is checkpointed.
        self.wrapped.train()
        self._ratio = options["lr"] / trainer.args.learning_rate

    def accumulation(self) -> AbstractContextManager:
        """Surrounds forward and backward of a micro-batch: gradients are averaged over ranks after the last one."""
        accelerator = self._trainer.accelerator
        is_last = accelerator.sync_gradients or self._trainer.is_deepspeed_enabled
        return nullcontext() if is_last else accelerator.no_sync(self.wrapped)

    def backward_and_step(self, loss: torch.Tensor) -> None:
        """Backward; at the end of an accumulation also the optimizer step, at the actor's place in its schedule."""
        accelerator, args = self._trainer.accelerator, self._trainer.args
        for group in self.optimizer.param_groups:
            group["lr"] = self._trainer.lr_scheduler.get_last_lr()[0] * self._ratio
        self.backward(loss)
        if accelerator.sync_gradients and not self._trainer.is_deepspeed_enabled:
            if args.max_grad_norm:
                accelerator.clip_grad_norm_(self.bare.parameters(), args.max_grad_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def backward(self, loss: torch.Tensor) -> None:
        """Backward alone; but under DeepSpeed the engine steps within it at the end of an accumulation."""
        accelerator = self._trainer.accelerator
        if self._trainer.is_deepspeed_enabled:
            deepspeed.backward(self.wrapped, loss, is_last=accelerator.sync_gradients)
        else:
            accelerator.backward(loss)

    def gathered(self, state_dict: dict[str, Any] | None) -> dict[str, Any]:
        """The critic's weights, whole. Collective under ZeRO-3."""
        return self._trainer.accelerator.get_state_dict(self.wrapped)

    def save(self, output_dir: str, weights: dict[str, Any]) -> None:
        self.bare.save_pretrained(Path(output_dir) / critic_files.FOLDER, state_dict=weights)

    def load(self, checkpoint: str) -> None:
        critic_files.load_model(checkpoint, self.bare)

    def save_training_state(self, checkpoint: str) -> None:
        """The optimizer; under DeepSpeed the engine, every rank its part."""
        if self._trainer.is_deepspeed_enabled:
            self.wrapped.save_checkpoint(str(Path(checkpoint) / critic_files.FOLDER / "engine"))
        elif self._trainer.args.should_save:
            critic_files.save_optimizer(checkpoint, self.optimizer)

    def load_training_state(self, checkpoint: str) -> None:
        if self._trainer.is_deepspeed_enabled:
            self.wrapped.load_checkpoint(str(Path(checkpoint) / critic_files.FOLDER / "engine"))
        else:
            critic_files.load_optimizer(checkpoint, self.optimizer)


def _head_dtype(trainer: Any, model: Any) -> torch.dtype:
    # A model that ZeRO-3 has split at load time is cast no more: another dtype would stop DeepSpeed.
    return model.dtype if trainer.is_deepspeed_enabled else torch.float32


def _decay_groups(trainer: Any, model: Any) -> list[dict[str, Any]]:
    """Trained parameters with weight decay, and biases and norms without."""
    names = set(trainer.get_decay_parameter_names(model))
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for n, p in trained if n in names], "weight_decay": trainer.args.weight_decay},
        {"params": [p for n, p in trained if n not in names], "weight_decay": 0.0},
    ]


def split_group(optimizer: Any, parameters: list[torch.nn.Parameter], learning_rate: float) -> None:
    """Give these parameters of an optimizer without state a learning rate of their own."""
    wanted = {id(p) for p in parameters}
    for group in list(optimizer.param_groups):
        own = [p for p in group["params"] if id(p) in wanted]
        if own:
            group["params"] = [p for p in group["params"] if id(p) not in wanted]
            optimizer.add_param_group({**group, "params": own, "lr": learning_rate})


def make_critic(kind: str, trainer: Any, value_model: Any = None, reward_adapter: str | None = None) -> Any:
    """The critic of this kind, attached to the trainer's actor."""
    if kind == "separate":
        return SeparateCritic(trainer, value_model)
    return HeadCritic(trainer) if kind == "head" else AdapterCritic(trainer, reward_adapter)


def choose_critic(args: Any, is_peft: bool, value_model: Any, reward_adapter: str | None = None) -> str:
    """Which critic, given what was asked for and what there is.

    Raises:
        ConfigError: what was asked for cannot be with what there is.
    """
    critic = args.critic or ("separate" if value_model is not None else "adapter" if is_peft else "head")
    if critic == "adapter" and not is_peft:
        raise ConfigError(
            "critic='adapter' is a second LoRA beside the actor's, but the actor has none. Give "
            "peft_config=LoraConfig(...), or take critic='head'."
        )
    if critic == "separate" and value_model is None:
        raise ConfigError(
            "critic='separate' needs value_model: a model or path for AutoModelForSequenceClassification with "
            "num_labels=1, of the actor's tokenizer. Or take critic='head'."
        )
    if critic != "separate" and value_model is not None:
        raise ConfigError(f"value_model has no use with critic='{critic}'. Drop one of the two.")
    if critic == "adapter" and args.deepspeed_plugin is not None and args.deepspeed_plugin.zero_stage == 3:
        raise ConfigError(
            "critic='adapter' is not possible under ZeRO-3: DeepSpeed prefetches weights in the order of modules it "
            "saw first, which changes with the role, and needs reentrant checkpointing with PEFT, which cannot keep "
            "the adapters apart. Use ZeRO-2 (LoRA has little optimizer state to shard), or critic='head'."
        )
    if critic != "adapter" and reward_adapter is not None:
        raise ConfigError(
            f"reward_adapter is a third LoRA beside those of actor and critic, but critic='{critic}' has none. Take "
            "critic='adapter' with a peft_config, or give the reward model as reward_model."
        )
    if critic == "separate" and args.fp16:
        raise ConfigError("fp16's loss scaling does not know the optimizer of critic='separate'. Use bf16.")
    return critic
