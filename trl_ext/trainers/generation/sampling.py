"""Generation between training steps: how it samples, how it restores the model, which weights vLLM
gets, and whether its rows can be scored."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch import nn
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.utils import logging

from trl_ext.compat.generate import compiled_decoding, known_rows_skipped, prompts_forked, weights_cast_once
from trl_ext.compat.peft import adapter_layers, base_model
from trl_ext.compat.swap import swapped
from trl_ext.compat.trl import sampling_temperature
from trl_ext.errors import DataError
from trl_ext.memory.formulas.generation import CACHE_STEP_TOKENS
from trl_ext.packing.families.rope import kinds_of
from trl_ext.trainers.checkpoints.ranks import gathered
from trl_ext.trainers.generation.ahead import GenerationAhead
from trl_ext.trainers.generation.parts import RolloutPart
from trl_ext.trainers.generation.trainer import AheadTrainer, RolloutTrainer
from trl_ext.trainers.step.unpadded import rows_without_prompt

logger = logging.get_logger(__name__)
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_EXPERTS = (
    "vLLM may route tokens of this mixture of experts to others than the trainer does, and so give them other "
    "log-probabilities: sampling/sampling_logp_difference/mean and sampling/importance_sampling_ratio/min show how "
    "far. Where ratios fall far below 1, vllm_importance_sampling_mode=token_truncate keeps what others drop."
)


@contextmanager
def generating(trainer: RolloutTrainer, *, is_packed: bool) -> Iterator[None]:
    """Let the trainer generate inside the block, at `eval_temperature` in evaluation, and restore it after.

    A group's prompt is read once by continuous batching and by `generate`, which forwards only rows that have not
    ended; not so if packing is off. On a CPU `generate` casts float32 weights once, and holds both copies.
    """
    temperature = None if trainer.model.training else getattr(trainer.args, "eval_temperature", None)
    is_continuous = trainer.use_transformers_continuous_batching
    is_whole = _generates_whole(trainer)
    is_static = is_whole and trainer.generation_config.cache_implementation == "static"
    casts_once = is_whole and trainer.args.device.type == "cpu"
    by_length = kinds_of(base_model(trainer.model).config.get_text_config())  # positions depend on the longest row
    with (
        _inside(temperature is not None, sampling_temperature, trainer, temperature),
        _inside(is_continuous, _model_kept, trainer.model),
        _inside(is_continuous, _outputs_uncast, trainer.model, trainer.accelerator),
        _inside(is_packed and is_continuous, prompts_forked, base_model(trainer.model)),
        _inside(is_whole and is_packed and not by_length, known_rows_skipped, trainer.model),
        _inside(casts_once, weights_cast_once, trainer.model, trainer.accelerator.autocast),
        _inside(is_static, compiled_decoding, trainer.model, CACHE_STEP_TOKENS),
    ):
        yield


def _inside(applies: bool, block: Callable[..., AbstractContextManager[Any]], *given: Any) -> AbstractContextManager:
    """Return the context `block(*given)` if it applies, else a context that does nothing."""
    return block(*given) if applies else nullcontext()


def prepare_generation(trainer: AheadTrainer, *, takes_images: bool) -> list[RolloutPart]:
    """Push weights with LoRA to vLLM layer by layer; return the part that generates ahead if the config has it."""
    if trainer.use_vllm:
        push_by_layers(trainer.vllm_generation)
        config = base_model(trainer.model).config.get_text_config()
        if any(getattr(config, name, 0) for name in _NUM_EXPERTS) and trainer.accelerator.is_main_process:
            logger.warning(_EXPERTS)
    is_ahead = getattr(trainer.args, "generation_ahead", 0)
    return [GenerationAhead(trainer, takes_images=takes_images)] if is_ahead else []


def _generates_whole(trainer: RolloutTrainer) -> bool:
    """Return True if `generate` of transformers runs with unsharded weights; sharded ones need forwards in step."""
    by_others = trainer.use_vllm or trainer.use_transformers_continuous_batching or trainer.rollout_func is not None
    return not (is_deepspeed_zero3_enabled() or trainer.is_fsdp_enabled or by_others)


def check_generated(
    trainer: RolloutTrainer, prompt_ids: Sequence[Any], completion_ids: Sequence[Any], logps: Any
) -> None:
    """Raise DataError on all ranks if rows of a rank cannot be scored. Collective.

    Args:
        trainer: Whose rollouts they are.
        prompt_ids, completion_ids: Token ids by row.
        logps: Of the sampling policy, for each completion token of each row; None if unknown.
    """
    problem = rows_without_prompt(list(map(len, prompt_ids)), list(map(len, completion_ids)))
    if not problem and (trainer.use_vllm or trainer.rollout_func is not None):
        needed = trainer.use_vllm and trainer.vllm_importance_sampling_correction
        problem = _lacking_logps(completion_ids, logps, trainer.accelerator.process_index, needed=needed)
    for found in filter(None, gathered(trainer.args, problem)):
        raise DataError(found)


def can_log_images(trainer: RolloutTrainer, images: Any, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Return False, with a warning, if some ranks' rows have images and other ranks' rows have none. Collective.

    Issue: TRL gathers the images of a generation only on ranks that have some, and its other ranks wait elsewhere.
    Fixed in: no version of TRL up to 1.16.
    Remove when: all ranks gather, with images or without.

    Args:
        trainer: It has just generated.
        images: Images of the generation's prompts; None if no row has any, or a rollout_func generated.
        rows: This rank's rows with their columns.
    """
    if not trainer.log_multimodal or trainer.accelerator.num_processes == 1:
        return bool(trainer.log_multimodal)
    shows = images is not None or any(row.get("images") or row.get("image") is not None for row in rows)
    is_alike = len(set(gathered(trainer.args, shows))) == 1
    if not is_alike and trainer.accelerator.is_main_process:
        logger.warning(
            "Rows of some processes show images, others show none, which TRL cannot log: tables of "
            "completions have no images from here on. log_multimodal=False leaves them out from the start."
        )
    return is_alike


def _lacking_logps(completion_ids: Sequence[Any], logps: Any, rank: int, *, needed: bool) -> str:
    """Return a sentence about a completion without a sampling log-probability for each token; "" if there is none.

    TRL pads missing values, and would compare tokens with the numbers of other tokens.

    Args:
        completion_ids: Token ids by row.
        logps: By row; None if unknown.
        rank: Of the rows, for the sentence.
        needed: Whether the loss needs them.
    """
    found = ""
    if logps is None:
        found = f"Rank {rank} got no log-probabilities of its {len(completion_ids)} completions." if needed else ""
    elif len(logps) != len(completion_ids):
        found = f"Rank {rank} got {len(completion_ids)} completions, and log-probabilities of {len(logps)}."
    else:
        for row, (tokens, given) in enumerate(zip(map(len, completion_ids), map(len, logps), strict=True)):
            if tokens != given:
                found = f"Row {row} of rank {rank} has {tokens} sampled tokens, and {given} log-probabilities of them."
                break
    advice = (
        " They are compared token by token: take a vLLM that this TRL supports, and let a rollout_func return one "
        "log-probability for each token."
    )
    return found and found + advice


@contextmanager
def _model_kept(model: torch.nn.Module) -> Iterator[None]:
    """Restore the mode, and parameters and buffers that were cast inside the block; until then both copies are held.

    TRL leaves the model in training mode, which would end an evaluation with its first batch. It casts the whole model
    to `bf16` or `fp16` for continuous batching and leaves it so: weights loaded in float32 would be trained in half
    precision from then on, and the frequencies of rotary embeddings would lose precision.
    """
    weights = [(parameter, parameter.data) for parameter in model.parameters()]
    buffers = [(module, name, buffer) for module in model.modules() for name, buffer in module._buffers.items()]
    is_training = model.training
    try:
        yield
    finally:
        model.train(is_training)
        for parameter, data in weights:
            if parameter.dtype != data.dtype:
                parameter.data = data
        for module, name, buffer in buffers:
            now = module._buffers[name]
            if buffer is not None and now is not None and now.dtype != buffer.dtype:
                module._buffers[name] = buffer


@contextmanager
def _outputs_uncast(model: torch.nn.Module, accelerator: Any) -> Iterator[None]:
    """Skip accelerate's cast of outputs to float32 inside the block; mixed precision stays on.

    Issue: the outputs of transformers 5.24 hold the paged cache, which accelerate takes for a half-precision tensor.
    Fixed in: no version of accelerate up to 1.15.
    Remove when: accelerate casts tensors only, or transformers keeps the cache out of the outputs.
    """
    forward = vars(model).get("_original_forward")
    if forward is None:  # accelerate wrapped nothing: no mixed precision, or an adapter's model around this model
        yield
        return

    def uncast(*args: Any, **kwargs: Any) -> Any:
        with accelerator.autocast():  # for the thread that generates
            return forward(*args, **kwargs)

    with swapped(model, forward=uncast):
        yield


# Weights with LoRA for vLLM -------------------------------------------------------------------------------------


def push_by_layers(vllm_generation: Any) -> None:
    """Make TRL's VLLMGeneration send merged weights layer by layer, except under FSDP or with a quantized base.

    TRL merges adapters into the base, sends the weights and unmerges, which changes a base in bfloat16; under ZeRO-3
    it gathers the whole model on every card for this. Here each layer is gathered, merged in copies of its weights
    and sent separately: a card holds one layer in addition to its shard, and the base is never written.

    Issue: TRL merges in place, which changes a base in bfloat16 (6688).
    Fixed in: no version of TRL up to 1.16.
    Remove when: TRL merges in copies, a layer at a time.
    """
    model, dist = vllm_generation.model, vllm_generation._dist
    if isinstance(model, PeftModel) and not dist.is_fsdp and getattr(model, "hf_quantizer", None) is None:
        vllm_generation._iter_named_params = MethodType(merged_layers, vllm_generation)


def merged_layers(vllm_generation: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each weight under vLLM's name, merged with its adapter. Collective: every process has to consume all.

    Replaces trl.generation.vllm_generation.VLLMGeneration._iter_named_params.
    """
    model, seen = vllm_generation.model, set()
    for path, module in _layers(model):
        is_tuned = isinstance(module, BaseTunerLayer)
        parameters = dict(module.named_parameters(recurse=is_tuned))
        if not parameters:
            continue
        layers: list[Any] = adapter_layers(module) if is_tuned else []  # several layers of a module may be nested
        with vllm_generation._dist.gather_params(list(parameters.values())):
            own = [(parameter, parameter.data) for parameter in parameters.values() if is_tuned]
            try:
                for parameter, values in own:
                    parameter.data = values.clone()
                for layer in layers:
                    layer.merge()
                for name, parameter in parameters.items():
                    whole = f"{path}.{name}".removeprefix("base_model.model.").replace(".base_layer", "")
                    if model.prefix in whole or id(parameter) in seen:  # an adapter's, or a tied weight's second name
                        continue
                    seen.add(id(parameter))
                    whole = vllm_generation._fix_param_name_to_vllm(whole, extra_prefixes=["modules_to_save.default."])
                    yield whole, parameter.data
            finally:
                for parameter, values in own:
                    parameter.data = values
                for layer in layers:
                    layer.merged_adapters.clear()  # `unmerge` would subtract from the weights being sent


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules with their paths, without modules inside a tuned layer and without originals that PEFT copied."""
    inside: tuple[str, ...] = ()
    for path, module in model.named_modules():
        if inside and f"{path}.".startswith(inside):
            continue
        if isinstance(module, BaseTunerLayer):
            inside = (*inside, f"{path}.")
        elif isinstance(module, ModulesToSaveWrapper):
            inside = (*inside, f"{path}.original_module.")
        yield path, module
