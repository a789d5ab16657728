"""What we lean on outside our own walls: versions, optional packages, and the seams in TRL and its neighbours.

The only file that asks for a version. Every method or function that we override, or call below the public surface,
stands in `SEAMS` with the parameters that we count on; one test walks the table, so that an upgrade fails by name in
seconds.
"""

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from trl_ext.errors import SupportError

# Package: lowest version that works, first version that is not tested.
SUPPORTED = {
    "torch": ("2.11", None),
    "transformers": ("5.17", None),
    "trl": ("1.15", "1.17"),
}


@dataclass(frozen=True, slots=True)
class Seam:
    """A place in another project that we hold on to.

    Args:
        where: "module:name" or "module:Class.method".
        parameters: Parameters that we pass by name or rely on, in this order.
        why: What we do there.
    """

    where: str
    parameters: tuple[str, ...]
    why: str


SEAMS = (
    Seam(
        "trl.trainer.grpo_trainer:GRPOTrainer.__init__",
        ("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class"),
        "checks the data and guards the reward functions before, installs packing after",
    ),
    Seam(
        "trl.trainer.grpo_trainer:GRPOTrainer._get_per_token_logps_and_entropies",
        (
            "model",
            "input_ids",
            "attention_mask",
            "logits_to_keep",
            "batch_size",
            "compute_entropy",
            "compute_aux_loss",
            "pixel_values",
        ),
        "the one method that carries the old-policy, the reference and the loss forward; packed here",
    ),
    Seam(
        "trl.trainer.grpo_trainer:GRPOTrainer._prepare_inputs",
        ("generation_batch",),
        "puts group mates of an optimizer step side by side; runs the self-check before the first generation",
    ),
    Seam(
        "trl.trainer.grpo_trainer:GRPOTrainer._calculate_rewards",
        ("inputs", "prompts", "completions", "completion_ids_list"),
        "lets all ranks fail together when a reward raises on one",
    ),
    Seam(
        "trl.trainer.grpo_trainer:GRPOTrainer._generate",
        ("prompts",),
        "timed as the phase `generate`; greedy in evaluation when asked; its 2nd and 4th results are scored early",
    ),
    Seam(
        "trl.trainer.grpo_trainer:GRPOTrainer._generate_and_score_completions",
        ("inputs",),
        "notes the rows whose columns the rules read",
    ),
    Seam(
        "trl.trainer.grpo_trainer:GRPOTrainer._load_optimizer_and_scheduler",
        ("checkpoint",),
        "called with the checkpoint to resume from; the state of rules and rollouts is beside the optimizer's",
    ),
    Seam(
        "trl.trainer.grpo_trainer:GRPOTrainer._save_checkpoint",
        ("model", "trial"),
        "rollouts that are not used up are saved with the rest",
    ),
    Seam(
        "trl.trainer.grpo_trainer:GRPOTrainer._get_train_sampler",
        ("dataset",),
        "a sampler that can be put at an epoch",
    ),
    Seam(
        "trl.trainer.utils:RepeatSampler.__init__",
        ("data_source", "mini_repeat_count", "batch_size", "repeat_count", "shuffle", "seed"),
        "its generator, seeded once, draws one permutation of `num_samples` an epoch",
    ),
    Seam(
        "trl.trainer.grpo_trainer:GRPOTrainer.training_step",
        ("model", "inputs", "num_items_in_batch"),
        "timed as the phase `update`; sums the packing counters at the end of an optimizer step",
    ),
    Seam(
        "trl.trainer.grpo_trainer:GRPOTrainer.evaluate",
        ("eval_dataset", "ignore_keys", "metric_key_prefix"),
        "its seconds are a phase of their own",
    ),
    Seam(
        "trl.trainer.reward_trainer:RewardTrainer.__init__",
        ("model", "args", "data_collator", "train_dataset", "eval_dataset", "processing_class", "peft_config"),
        "checks the data before; installs packing and our collator after",
    ),
    Seam(
        "trl.trainer.reward_trainer:RewardTrainer._prepare_dataset",
        ("dataset", "processing_class", "args", "dataset_name"),
        "names bad pairs before; fits to length and counts shared tokens after. TRL calls it for training pairs first",
    ),
    Seam(
        "trl.trainer.reward_trainer:RewardTrainer._set_signature_columns_if_needed",
        (),
        "lets the columns `shared_tokens` and `rule_gap` through to the collator",
    ),
    Seam(
        "trl.trainer.reward_trainer:RewardTrainer.compute_loss",
        ("model", "inputs", "return_outputs", "num_items_in_batch"),
        "scores flat rows; TRL's own for padded batches",
    ),
    Seam(
        "trl.trainer.reward_trainer:RewardTrainer.get_train_dataloader",
        (),
        "under a token budget, rows planned over the pairs that its sampler would deal out",
    ),
    Seam(
        "trl.trainer.reward_trainer:RewardTrainer.get_batch_samples",
        ("epoch_iterator", "num_batches", "device"),
        "the one place where a rank sees all batches of an optimizer step: agree on pairs and forwards",
    ),
    Seam("trl.trainer.reward_trainer:RewardTrainer.training_step", (), "timed as the phase `update`"),
    Seam(
        "transformers:Trainer.training_step",
        ("model", "inputs", "num_items_in_batch"),
        "called once a row under a token budget, through TRL's, which passes everything on",
    ),
    Seam(
        "trl.trainer.reward_trainer:RewardTrainer.evaluation_loop",
        ("dataloader", "description", "prediction_loss_only", "ignore_keys", "metric_key_prefix"),
        "its seconds are a phase of their own; metrics over all pairs of it",
    ),
    Seam(
        "trl.trainer.reward_trainer:RewardTrainer.floating_point_ops",
        ("inputs",),
        "counts the tokens of flat rows",
    ),
    Seam(
        "trl.trainer.reward_trainer:RewardTrainer._track_num_input_tokens",
        ("inputs",),
        "counts the tokens of flat rows",
    ),
    Seam(
        "accelerate.data_loader:DataLoaderShard.__init__",
        ("dataset", "device", "rng_types", "synchronized_generator"),
        "a loader whose batches were planned for this rank already",
    ),
    Seam(
        "accelerate.data_loader:BatchSamplerShard.__init__",
        ("batch_sampler",),
        "keeps the batches of all ranks, from which an optimizer step is planned",
    ),
    Seam(
        "accelerate.state:GradientState._set_sync_gradients",
        ("sync_gradients",),
        "more rows of a micro-batch follow: neither DDP nor DeepSpeed takes this backward for the last one",
    ),
    Seam("trl.trainer.reward_config:RewardConfig.__post_init__", (), "checks our own fields after TRL's"),
    Seam(
        "trl.trainer.utils:add_fused_lm_head",
        ("model", "temperature", "cast_lm_head_to_fp32", "outputs"),
        "log-probabilities and entropies of a packed row without its logits; `shift_labels` at chosen positions",
    ),
    Seam("trl.trainer.utils:is_async_callable", (), "guards asynchronous reward functions as such"),
    Seam("trl.trainer.grpo_trainer:GRPOTrainer._tokenize_prompts", ("prompts",), "measures the longest prompt"),
    Seam("trl.trainer.grpo_config:GRPOConfig.__post_init__", (), "checks our own fields after TRL's"),
    Seam(
        "trl.trainer.grpo_trainer:GRPOTrainer._compute_loss",
        ("model", "inputs"),
        "advantages of shape [B, T]; the KL is in the reward, so beta is 0 meanwhile; the value loss comes on top",
    ),
    Seam("trl.trainer.utils:FusedCausalLMOutput", ("log_probs", "entropy"), "values stand beside its fields"),
    Seam(
        "trl.trainer.grpo_trainer:GRPOTrainer.compute_loss",
        ("model", "inputs", "return_outputs", "num_items_in_batch"),
        "a micro-batch goes in pieces when memory runs out",
    ),
    Seam("accelerate.utils:map_pytorch_optim_to_deepspeed", ("optimizer",), "the second engine's, in host memory"),
    Seam("accelerate.utils.memory:should_reduce_batch_size", ("exception",), "which errors are out of memory"),
    Seam("accelerate.utils.memory:clear_device_cache", ("garbage_collection",), "gives back what a forward held"),
    Seam("trl.models.utils:prepare_deepspeed", ("model", "accelerator"), "reference, reward and value models"),
    Seam("peft.tuners.tuners_utils:BaseTunerLayer.set_adapter", ("adapter_names",), "the state that roles switch"),
    Seam(
        "transformers:PreTrainedModel.gradient_checkpointing_enable",
        ("gradient_checkpointing_kwargs",),
        "the one way by which trainers switch checkpointing on; roles are pinned in its kwargs",
    ),
    Seam(
        "trl:TrlParser.parse_args_and_config",
        ("args", "return_remaining_strings", "fail_with_unknown_args", "separate_remaining_strings"),
        "strict parsing in the scripts",
    ),
    Seam("accelerate.commands.launch:launch_command_parser", ("subparsers",), "`trl-ext grpo` reads its options"),
    Seam("accelerate.commands.launch:launch_command", ("args",), "`trl-ext grpo` starts the processes with it"),
    Seam(
        "accelerate:DistributedDataParallelKwargs",
        ("gradient_as_bucket_view",),
        "the accelerator's `ddp_handler`: DDP's gradients live in its buckets",
    ),
    Seam("transformers:AttentionInterface.register", ("key", "value"), "packed attention is one more implementation"),
    Seam("transformers:AttentionMaskInterface.register", ("key", "value"), "the mask that it needs: none"),
)


def resolve(where: str) -> Any:
    """The object behind "module:name" or "module:Class.method"."""
    module, _, path = where.partition(":")
    found = import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return found


def missing_parameters(seam: Seam) -> list[str]:
    """Parameters of the seam that the installed version does not have (or not in this order)."""
    names = list(inspect.signature(resolve(seam.where)).parameters)
    present = [p for p in seam.parameters if p in names]
    in_order = present == sorted(present, key=names.index)
    return [p for p in seam.parameters if p not in names] or ([] if in_order else list(seam.parameters))


def check_versions() -> None:
    """Stop early on a version outside the support window.

    Raises:
        SupportError: a package of `SUPPORTED` is missing or outside its window.
    """
    from packaging.version import Version

    for package, (low, high) in SUPPORTED.items():
        try:
            found = Version(version(package))
        except PackageNotFoundError as error:
            raise SupportError(f"{package} is not installed. Run: pip install '{package}>={low}'") from error
        if found < Version(low) or (high is not None and found >= Version(high)):
            wanted = f"{package}>={low}" + (f",<{high}" if high else "")
            raise SupportError(f"{package} {found} is outside the supported window. Run: pip install '{wanted}'")


def check_fused_head(device_type: str) -> None:
    """Stop early where TRL's fused LM head, which scores every token, cannot run.

    Raises:
        SupportError: TRL 1.15 on a device without Triton.
    """
    from packaging.version import Version

    # Issue: TRL 1.15's fused LM head needs Triton, so that nothing can be scored on a CPU.
    # Fixed in: TRL 1.16.
    # Remove when: trl>=1.16 is the lower bound.
    if device_type == "cpu" and Version(version("trl")) < Version("1.16"):
        raise SupportError(
            f"TRL {version('trl')} computes log-probabilities on GPUs only. Run: pip install 'trl>=1.16,<1.17'"
        )


def versions(*packages: str) -> dict[str, str]:
    """The installed version of each package, for reports."""
    return {package: version(package) for package in packages}


@cache
def is_installed(package: str) -> bool:
    return find_spec(package) is not None


# transformers -----------------------------------------------------------------------------------------------------


def attention_function(name: str) -> Callable[..., Any]:
    """transformers' own attention function of this name."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS[name]


def mask_function(name: str) -> Callable[..., Any]:
    """transformers' own mask function of this name."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    return ALL_MASK_ATTENTION_FUNCTIONS[name]


def register_attention(name: str, attention: Callable[..., Any], mask: Callable[..., Any]) -> None:
    """Make `name` an attention implementation that models can be switched to."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)


# TRL --------------------------------------------------------------------------------------------------------------


def is_async_callable(function: Any) -> bool:
    """Whether TRL will await this reward function."""
    return bool(resolve("trl.trainer.utils:is_async_callable")(function))


@contextmanager
def sampling_temperature(trainer: Any, temperature: float) -> Iterator[None]:
    """Let a TRL trainer generate at another temperature, 0 for greedy, within the block."""
    owner, name = (trainer.vllm_generation, "temperature") if trainer.use_vllm else (trainer, "generation_config")
    before = getattr(owner, name)
    setattr(owner, name, temperature if trainer.use_vllm else _with_temperature(before, temperature))
    try:
        yield
    finally:
        setattr(owner, name, before)


def _with_temperature(config: Any, temperature: float) -> Any:
    changed = copy.deepcopy(config)
    if temperature == 0:
        changed.update(do_sample=False, temperature=None, top_p=None, top_k=None, min_p=None)
    else:
        changed.update(do_sample=True, temperature=temperature)
    return changed


def let_loss_be_scaled(trainer: Any) -> None:
    """Tell a Trainer that `compute_loss` divides by all items of an optimizer step itself."""
    from packaging.version import Version

    trainer.loss_is_scaled_for_ga = True
    # Issue: before 5.19 transformers reads another attribute for the same.
    # Fixed in: transformers 5.19.
    # Remove when: transformers>=5.19 is the lower bound.
    if Version(version("transformers")) < Version("5.19"):
        trainer.compute_loss_func = "not None: the loss is scaled already"


# accelerate -------------------------------------------------------------------------------------------------------


def global_batches(loader: Any) -> Any:
    """The batch sampler of all ranks behind a loader that accelerate has prepared."""
    return getattr(loader.batch_sampler, "batch_sampler", loader.batch_sampler)


def with_batch_sampler(loader: Any, dataset: Any, batch_sampler: Any) -> Any:
    """A prepared loader like `loader` that takes this rank's own batches from `batch_sampler`."""
    from accelerate.data_loader import DataLoaderShard

    same = ("collate_fn", "num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")
    same += ("prefetch_factor", "persistent_workers", "in_order")
    return DataLoaderShard(
        dataset,
        device=loader.device,
        rng_types=loader.rng_types,
        synchronized_generator=loader.synchronized_generator,
        batch_sampler=batch_sampler,
        **{name: getattr(loader, name) for name in same},
    )


# torch and flash-attn ---------------------------------------------------------------------------------------------


def has_varlen_attention(device: Any) -> bool:
    """True where PyTorch's varlen kernel runs: Ampere cards and later, and a signature that takes a scale."""
    import torch

    # torch 2.10 had the kernel without a scale.
    return "scale" in _varlen_parameters() and torch.cuda.get_device_capability(device) >= (8, 0)


@cache
def _varlen_parameters() -> frozenset[str]:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)


def varlen_attention(
    q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, *, scale: float | None, window_left: int
) -> Any:
    """`varlen_attn`, causal with the lower-right corner aligned, under the signature that is installed.

    Args:
        q: [T, H, D]; k, v: [K, Hkv, D].
        window_left: Keys before itself that a query sees; -1 for all.
    """
    from torch.nn.attention.varlen import varlen_attn

    accepted = _varlen_parameters()
    options: dict[str, Any] = {"scale": scale, "window_size": (window_left, 0)}
    if q.shape[1] != k.shape[1]:
        if "enable_gqa" in accepted:
            options["enable_gqa"] = True
        else:
            # Issue: torch 2.11's varlen_attn wants as many key heads as query heads.
            # Fixed in: torch 2.12.
            # Remove when: torch>=2.12 is the lower bound.
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    return varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, **options)


@cache
def flash_attention(version: int) -> Callable[..., Any]:
    """`flash_attn_varlen_func` of the installed flash-attn 2 or 3.

    Raises:
        SupportError: it is not installed.
    """
    module = {2: "flash_attn", 3: "flash_attn_interface"}[version]
    try:
        return import_module(module).flash_attn_varlen_func
    except ImportError as error:
        raise SupportError(
            f"attn_implementation='flash_attention_{version}' needs the package {module}, which is not installed. "
            "Leave attn_implementation unset: PyTorch's own kernel packs as well."
        ) from error


def print_samples(logs: Any, num: int, step: int) -> None:
    """The last `num` completions of TRL's log, as its table."""
    columns = [list(logs[name])[-num:] for name in ("prompt", "completion")]
    rewards = {name: list(values)[-num:] for name, values in logs["rewards"].items()}
    show = resolve("trl.trainer.utils:print_prompt_completions_sample")
    show(*columns, rewards, list(logs["advantages"])[-num:], step)


class _NoGroup(int):
    """1, of which GRPO's `num_generations < 2` is not true: a critic needs no group."""

    def __lt__(self, other: Any) -> bool:
        return False


@contextmanager
def without_groups(config: Any) -> Iterator[None]:
    """Let TRL's GRPOConfig accept any num_generations inside the block."""
    given = config.num_generations
    config.num_generations = _NoGroup(1)
    try:
        yield
    finally:
        config.num_generations = given


def add_fused_head(model: Any, temperature: float, in_fp32: bool) -> None:
    """TRL's fused LM head on a model that TRL's own trainer does not know of."""
    resolve("trl.trainer.utils:add_fused_lm_head")(model, temperature=temperature, cast_lm_head_to_fp32=in_fp32)


def disable_dropout(model: Any) -> None:
    """No layer of the model drops anything."""
    resolve("trl.trainer.utils:disable_dropout_in_model")(model)


def prepare_deepspeed(model: Any, accelerator: Any) -> Any:
    """A frozen model as DeepSpeed holds it: sharded under ZeRO-3, else a copy on every process."""
    return resolve("trl.models.utils:prepare_deepspeed")(model, accelerator)


# PEFT -------------------------------------------------------------------------------------------------------------


def adapter_layers(model: Any) -> list[Any]:
    """All layers of a PeftModel that hold adapters."""
    layer = resolve("peft.tuners.tuners_utils:BaseTunerLayer")
    return [module for module in model.modules() if isinstance(module, layer)]


def adapter_state(layer: Any) -> tuple[list[str], bool]:
    """Which adapters compute in a layer, and whether all are switched off."""
    return list(layer.active_adapters), layer.disable_adapters


def set_adapter_state(layer: Any, state: tuple[list[str], bool]) -> None:
    """The same, set; unlike PEFT's own setters without a word on what requires a gradient."""
    layer._active_adapter, layer._disable_adapters = state


# DeepSpeed --------------------------------------------------------------------------------------------------------


def deepspeed_engine(model: Any, optimizer: Any, accelerator: Any) -> Any:
    """An engine of its own for a second trained model, with the settings of the first one.

    Accelerate prepares one model only; `accelerator.backward` belongs to that one.
    """
    import deepspeed
    from accelerate.utils import map_pytorch_optim_to_deepspeed

    config = copy.deepcopy(accelerator.state.deepspeed_plugin.deepspeed_config)
    place = config["zero_optimization"].get("offload_optimizer") or {}
    if place.get("device", "none") != "none" and config.get("zero_force_ds_cpu_optimizer", True):
        optimizer = map_pytorch_optim_to_deepspeed(optimizer)  # as accelerate does for its one model
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def deepspeed_backward(engine: Any, loss: Any, is_last: bool) -> None:
    """Backward on an engine, and its optimizer step after the last micro-batch of an accumulation."""
    engine.set_gradient_accumulation_boundary(is_boundary=is_last)
    engine.backward(loss, scale_wrt_gas=False)
    if is_last:
        engine.step()
