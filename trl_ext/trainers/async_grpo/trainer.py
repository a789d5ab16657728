"""`trl_ext.AsyncGRPOTrainer`: TRL's AsyncGRPOTrainer with attention that runs on any device.

TRL packs the rows, computes the loss and talks to vLLM.
"""

from contextlib import ExitStack
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from trl_ext.compat.peft import base_model
from trl_ext.compat.trl import async_grpo_trainer, peak_flops_unknown
from trl_ext.compat.versions import check_versions
from trl_ext.errors import ConfigError, SupportError
from trl_ext.monitor.streams import ignore_failed_writes
from trl_ext.packing.tree import TREE_ATTENTION, register_tree_attention
from trl_ext.trainers.checkpoints.secrets import guard_secrets
from trl_ext.trainers.ending.run_end import RunEnds, ended
from trl_ext.trainers.fit.plan import by_name
from trl_ext.trainers.generation.pushes import PushWatch, compared
from trl_ext.trainers.record.trainer import RunRecords

if TYPE_CHECKING:
    from trl.experimental.async_grpo import AsyncGRPOTrainer as TRLAsyncGRPOTrainer
else:
    TRLAsyncGRPOTrainer = async_grpo_trainer()

# TRL's metrics of seconds, and the phases of the report.
_PHASES = {"perf/rollout_wait_s": "generate_wait", "perf/fwd_bwd_s": "update", "perf/optimizer_s": "step"}


class AsyncGRPOTrainer(RunRecords, RunEnds, TRLAsyncGRPOTrainer):
    """Drop-in for TRL's AsyncGRPOTrainer, which documents the arguments.

    Attention computes by scaled_dot_product_attention on a processor, by flash-attention or PyTorch's varlen kernel on
    cards, and holds keys that samples share once.

    Metrics, one value per optimizer step:
        sampling/logit_difference: How far vLLM's logits are from the trainer's, from log-probabilities.
        phase/<name>_s: Seconds spent in generate_wait, update and step, on this rank.
    """

    args: Any
    optimizer: Any
    memory_kind = "grpo"

    def __init__(self, model: str, reward_funcs: Any = None, args: Any = None, *rest: Any, **kwargs: Any):
        ignore_failed_writes()
        check_versions()
        kwargs |= by_name(TRLAsyncGRPOTrainer.__init__, "args", rest)
        if kwargs.get("rollout_worker") is None and find_spec("aiohttp") is None:
            raise SupportError("TRL's rollouts need aiohttp, which is not installed. Run: pip install aiohttp")
        self.given_rewards = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs] if reward_funcs else []
        self._pushes = PushWatch()
        self._compared: list[torch.Tensor] = []
        self._num_steps = 0  # since the weights were pushed first
        with peak_flops_unknown(TRLAsyncGRPOTrainer):
            super().__init__(model, reward_funcs, args, **kwargs)
        guard_secrets(vars(self.args), set())
        config = base_model(self.model).config.get_text_config()
        if config._attn_implementation != TREE_ATTENTION:
            raise SupportError(
                f"This TRL gives its rows the attention {config._attn_implementation!r}, and trl_ext computes "
                f"{TREE_ATTENTION!r}. Take TRL's own AsyncGRPOTrainer, or a TRL that trl_ext was tested with."
            )
        if getattr(config, "attn_logit_softcapping", None):
            raise ConfigError(f"{model} caps its attention logits. TRL's own AsyncGRPOTrainer trains it on cards.")

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, ignore_keys_for_eval: Any = None
    ) -> Any:
        """Overrides transformers.Trainer.train: with a record and a report, and an end of all processes together."""
        ignore_failed_writes()  # again: a program may have opened other streams
        with ExitStack() as run:
            if trial is None and self.leaves_record:
                run.enter_context(self._recorded(None, is_resumed=bool(resume_from_checkpoint)))
            run.enter_context(ended(self))
            return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Overrides trl.AsyncGRPOTrainer.compute_loss: attends by our function, and keeps the log-probabilities."""
        # Again: the constructor of any trainer of TRL's registers TRL's function.
        register_tree_attention()
        outputs: list[Any] = []
        with model.register_forward_hook(lambda module, given, output: outputs.append(output)):
            loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        is_scored = inputs["token_index"] >= 0
        logps = outputs[0].log_probs.flatten()[inputs["token_index"][is_scored]]
        self._compared.append(compared(logps, inputs["old_log_probs"][is_scored]))
        return loss

    def _log_step_metrics(self) -> None:
        """Overrides trl.AsyncGRPOTrainer._log_step_metrics: adds metrics under the names of the other trainers, and
        looks whether pushed weights arrive. Collective."""
        super()._log_step_metrics()
        metrics = self._metrics["train"]
        for name, phase in _PHASES.items():
            if name in metrics:
                metrics[f"phase/{phase}_s"].append(metrics[name][-1])
        for name in [name for name in metrics if name.startswith("rewards/") and name.count("/") == 1]:
            metrics[f"{name}/mean"] = metrics[name]
        own, self._compared = torch.stack(self._compared).sum(dim=0), []
        staleness = max(metrics.get("sample/staleness_max", [0.0]))  # known to the main process alone
        found = self.accelerator.reduce(torch.cat([own, own.new_tensor([staleness])]), reduction="sum")
        # Batches are made a step before they train, so that samples may be a push older than they were then.
        behind = min((1 + found[2].item()) * self.args.weight_sync_steps, self._num_steps)
        self._num_steps += 1
        self._pushes.look(found[:2], behind * self.optimizer.param_groups[0]["lr"], self.state, metrics)
