"""One simulation, `python -m tests.twin.run JOB.json`: build the trainer on fake tensors as rank 0 of N, let it
train, and print where memory peaked as one line of JSON.

Runs in a process of its own, whose environment `driver` sets: a process group cannot be changed in a running one, and
a second simulation in one process has crashed in torch's autocast.

Not covered: generation (rollouts are given), evaluation, saving, CUDA's context and kernels' workspaces. DDP cannot be
built on fake tensors: a single process runs, its gradients where DDP has its buckets.
"""

import contextlib
import io
import json
import logging
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from transformers import TrainerCallback

from tests.twin import adapters, stand_ins
from tests.twin.driver import PREFIX
from tests.twin.simulation import Simulation
from tests.twin.tracker import Tracker

# A phase of the trainers' clocks: the planner's name for it.
PHASES = {"update": "update", "logps": "score", "score": "score", "generate": "score", "layout": "update"}
STEP = "step"
QUIET = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "eval_strategy": "no", "logging_steps": 1}


def run(simulation: Simulation) -> dict[str, Any]:
    """Run a simulation; return its peaks by phase, and whether it was packed, as JSON values."""
    if simulation.deepspeed:
        start_world(simulation.num_gpus)
    tracker = Tracker()
    with tempfile.TemporaryDirectory() as folder, silence(), adapted(simulation, tracker):
        arguments = make_arguments(simulation, folder)
        with FakeTensorMode(allow_non_fake_inputs=True), tracker:
            trainer = make_trainer(simulation, arguments)
            follow(trainer, tracker)
            trainer.leaves_record = False
            with gradients_in_buckets(simulation, trainer):
                trainer.train()
    peaks = {phase: asdict(peak) for phase, peak in tracker.peaks.items()}
    return {"peaks": peaks, "packed": bool(trainer.step_settings.packs)}


def start_world(num_gpus: int) -> None:
    """Start a process group whose collectives do nothing, and the real DeepSpeed on it."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=num_gpus, store=FakeStore())
    import deepspeed
    import deepspeed.comm.torch
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
    with adapters.no_kernel_is_built():
        deepspeed.init_distributed(dist_backend="fake", auto_mpi_discovery=False)


def silence() -> contextlib.AbstractContextManager[Any]:
    """Drop what trainers print inside the block."""
    return contextlib.redirect_stdout(io.StringIO())


@contextlib.contextmanager
def adapted(simulation: Simulation, tracker: Tracker) -> Iterator[None]:
    """Inside the block, all adapters that the simulation needs are in place."""
    needed = [
        adapters.lists_of_ones(),
        adapters.modules_cast_in_place(),
        adapters.fakes_are_copied(),
        adapters.adam_makes_its_state_only(),
        adapters.dropout_of_a_gpu(),
        adapters.attention_of_a_gpu(),
        adapters.rollouts_without_padding(simulation.arguments.get("num_generations", 1)),
        adapters.last_part_of_rows(),
        adapters.no_weights_are_sampled(),
        adapters.head_of_a_gpu(),
        adapters.reference_from_config(lambda: stand_ins.causal_model(simulation)),
        adapters.objects_from_this_rank(),
        optimizer_steps(tracker),
        tracker.following_modules(),
    ]
    if simulation.deepspeed:
        needed += [
            adapters.ranks_that_agree(),
            adapters.engine_steps(lambda: tracker.open_phase(STEP), tracker.close_phase),
        ]
    with contextlib.ExitStack() as stack:
        for adapter in needed:
            stack.enter_context(adapter)
        yield


@contextlib.contextmanager
def optimizer_steps(tracker: Tracker) -> Iterator[None]:
    """Inside the block, each step of one of torch's optimizers is a phase of the tracker."""
    before = register_optimizer_step_pre_hook(lambda optimizer, args, options: tracker.open_phase(STEP))
    after = register_optimizer_step_post_hook(lambda optimizer, args, options: tracker.close_phase())
    try:
        yield
    finally:
        before.remove()
        after.remove()


def follow(trainer: Any, tracker: Tracker) -> None:
    """Let the trainer's clock tell the phases, and its models the names of modules."""
    plain = trainer.clock.phase

    @contextlib.contextmanager
    def phase(name: str, whole: bool = False) -> Iterator[None]:
        with plain(name, whole), tracker.phase(PHASES.get(name, name)):
            yield

    trainer.clock.phase = phase
    trainer.add_callback(TrainingBegins(tracker))
    tracker.name_modules(trainer.model)
    value_model = value_model_of(trainer)
    if value_model is not None:
        tracker.name_modules(value_model, "critic.")


def value_model_of(trainer: Any) -> torch.nn.Module | None:
    """The model of a separate critic of PPO; None for other critics and trainers."""
    return getattr(getattr(trainer, "_critic", None), "bare", None)


class TrainingBegins(TrainerCallback):
    """Tells the tracker before the first step that loading is over: engines and optimizers stand."""

    def __init__(self, tracker: Tracker):
        self._tracker = tracker

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0:
            self._tracker.begin_training()


# Building ---------------------------------------------------------------------------------------------------------


def make_arguments(simulation: Simulation, folder: str, **others: Any) -> Any:
    """The trainer's config, with `others` over what a simulation has."""
    from trl_ext.trainers.grpo.config import GRPOConfig
    from trl_ext.trainers.ppo.config import PPOConfig
    from trl_ext.trainers.reward.config import RewardConfig

    kinds = {"reward": RewardConfig, "grpo": GRPOConfig, "ppo": PPOConfig}
    values = {**simulation.arguments, **QUIET, "use_cpu": True, "dataloader_pin_memory": False}
    values["max_steps"] = simulation.num_steps
    if simulation.trainer == "reward":
        values["max_length"] = simulation.completion_tokens
    else:
        # In the worst case no prompts are equal.
        values = {"share_prompt": False, **values, "max_completion_length": simulation.completion_tokens}
    if simulation.deepspeed:
        # Open to every optimizer, and with "auto" for batch sizes that the settings leave out.
        sizes = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
        opened = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
        values["deepspeed"] = {**dict.fromkeys(sizes, "auto"), **simulation.deepspeed, **opened}
    return kinds[simulation.trainer](output_dir=folder, **{**values, **others})


def make_trainer(simulation: Simulation, arguments: Any) -> Any:
    """The trainer, unmodified, on fake models."""
    rows = num_rows(simulation, arguments)
    common: dict[str, Any] = {
        "args": arguments,
        "processing_class": stand_ins.tokenizer(),
        "peft_config": lora(simulation, "SEQ_CLS" if simulation.trainer == "reward" else "CAUSAL_LM"),
    }
    if simulation.trainer == "reward":
        from trl_ext.trainers.reward.trainer import RewardTrainer

        pairs = stand_ins.preference_pairs(rows, simulation.completion_tokens)
        return RewardTrainer(model=stand_ins.scorer(simulation), train_dataset=pairs, **common)
    number = simulation.num_reward_models if simulation.reward_model == "copy" else 0
    copies = [stand_ins.scorer(simulation, "bfloat16") for _ in range(number)]
    common |= {
        "model": stand_ins.causal_model(simulation),
        "train_dataset": stand_ins.prompts(rows),
        "rollout_func": stand_ins.rollouts(simulation),
    }
    if simulation.trainer == "grpo":
        from trl_ext.trainers.grpo.trainer import GRPOTrainer

        tokenizers = [stand_ins.tokenizer() for _ in copies] or None
        rewards = copies or stand_ins.fixed_reward
        return GRPOTrainer(reward_funcs=rewards, reward_processing_classes=tokenizers, **common)
    from trl_ext.trainers.ppo.trainer import PPOTrainer

    # A model that is given is copied as reference; one that is loaded by name is loaded twice, as here.
    has_reference = arguments.beta and not simulation.adapter
    return PPOTrainer(
        ref_model=stand_ins.causal_model(simulation) if has_reference else None,
        reward_model=copies,
        reward_funcs=None if copies else stand_ins.fixed_reward,
        value_model=stand_ins.scorer(simulation) if arguments.critic == "separate" else None,
        **common,
    )


def num_rows(simulation: Simulation, arguments: Any) -> int:
    """Rows of data for all steps of all ranks."""
    steps = max(arguments.gradient_accumulation_steps, getattr(arguments, "steps_per_generation", None) or 1)
    return 2 * simulation.num_steps * simulation.num_gpus * arguments.per_device_train_batch_size * steps + 2


def lora(simulation: Simulation, task: str) -> Any:
    """PEFT's config; None to train all weights."""
    if not simulation.adapter:
        return None
    from peft import LoraConfig

    return LoraConfig(**{"lora_alpha": simulation.adapter["r"], **simulation.adapter, "task_type": task})


# Counting ---------------------------------------------------------------------------------------------------------


def count_parameters(trainer: Any) -> dict[str, int]:
    """Parameters of the policy, and of all that is trained. ZeRO-3 keeps a weight's whole size beside its share."""
    own = list(trainer.model.parameters())
    critic = value_model_of(trainer)
    everything = own + ([] if critic is None else list(critic.parameters()))
    trained = sum(_numel(p) for p in everything if p.requires_grad)
    return {"num_params": sum(map(_numel, own)), "num_trained": trained}


def _numel(parameter: torch.nn.Parameter) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))


@contextlib.contextmanager
def gradients_in_buckets(simulation: Simulation, trainer: Any) -> Iterator[None]:
    """Give every gradient its place before training, and never take it back: so they lie in DDP's buckets."""
    if simulation.deepspeed or simulation.num_gpus == 1:
        yield
        return
    models = [trainer.model, value_model_of(trainer)]
    for parameter in (p for model in models if model is not None for p in model.parameters() if p.requires_grad):
        parameter.grad = torch.zeros_like(parameter)
    owners = ("torch.nn:Module", "torch.optim:Optimizer")
    with adapters.replaced(*((f"{owner}.zero_grad", lambda *_, **__: None) for owner in owners)):
        yield


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    asked = Simulation(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    print(PREFIX + json.dumps(run(asked)), flush=True)
