"""The fingerprint of a run, kept in its checkpoints: model, rules, data, processes, seed and settings.

Short values are stored instead of hashes, so that an error can name the old and the new value.
"""

import hashlib
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import TrainingArguments

from trl_ext.rewards import RuleSet
from trl_ext.rewards.text.secrets import public
from trl_ext.trainers.checkpoints.saved import SavedTrainer

# Parts that are compared; `resume_despite` may name these.
PARTS = ("model", "rules", "rewards", "data", "processes", "seed", "settings")
_NUM_ROWS, _NUM_TENSORS, _NUM_VALUES = 64, 64, 256
# Keys of a model's config that do not affect the numbers of a training step.
_OPERATIONAL_KEYS = frozenset(
    "transformers_version dtype torch_dtype use_cache architectures id2label label2id gradient_checkpointing "
    "output_attentions output_hidden_states return_dict is_encoder_decoder chunk_size_feed_forward "
    "quantization_config auto_map".split()
)
# Fields of rules and rule sets on where they run, which server they call and which limits they have.
_HOW_RULES_RUN = frozenset({"limits", "isolate", "on_unscored", "base_url", "api_key_env", "concurrency", "retries"})
_ADAPTER_KEYS = ("peft_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "bias")


def fingerprint(trainer: SavedTrainer) -> dict[str, Any]:
    """Return the fingerprint of a trainer that has not begun to train, as plain JSON."""
    functions, config = getattr(trainer, "reward_funcs", ()), getattr(trainer.model, "config", None)
    weights = trainer.model.named_parameters()
    shapes = [(name, list(getattr(p, "ds_shape", p.shape))) for name, p in weights if p.requires_grad]
    found = {
        "trainer": trainer.memory_kind,
        "model": {
            "config": {} if config is None else _without_operational(config.to_dict()),
            "adapters": {
                name: _adapter_of(config) for name, config in getattr(trainer.model, "peft_config", {}).items()
            },
            "trained": {"tensors": len(shapes), "shapes": _hash(json.dumps(sorted(shapes)).encode())},
            **_sample("frozen", (p for p in trainer.model.parameters() if not p.requires_grad)),
            **_reference_of(trainer),
        },
        "rules": {
            "rewards": [described(function) for function in functions],
            "weights": getattr(trainer.args, "reward_weights", None),
        },
        "rewards": {
            f"the source of {name}, number {i + 1}": source
            for i, function in enumerate(getattr(trainer, "given_rewards", ()) if functions else ())
            for name, source in sources_of(function)
        },
        "data": data_of(trainer.train_dataset) | {"tokenizer": _tokenizer_of(trainer.processing_class)},
        "processes": trainer.args.world_size,
        "seed": {"seed": trainer.args.seed, "data_seed": trainer.args.data_seed},
        "settings": {name: described(value) for name, value in settings_of(trainer.args).items()},
        "restored": {
            name: described(getattr(trainer.args, name))
            for name in (*RESTORED, *REDRAWN)
            if hasattr(trainer.args, name)
        },
    }
    return public(json.loads(json.dumps(found, sort_keys=True)))


def differences(old: Any, new: Any, where: str = "") -> Iterator[str]:
    """Yield "<name> was <old> and is <new>" for each difference of two fingerprints.

    Keys that only one of them has come from another version, and are ignored.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        for key in old:
            if key in new:
                yield from differences(old[key], new[key], f"{where}.{key}" if where else key)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for i, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from differences(one, other, f"{where}[{i}]")
    elif old != new:
        yield f"{where} was {_short(old)} and is {_short(new)}"


def described(value: Any) -> Any:
    """Return a value as JSON: dataclasses by fields, functions by name, models by a sample of their weights."""
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, nn.Module):
        return {"type": type(value).__qualname__, **_sample("weights", value.parameters())}
    if is_dataclass(value) and not isinstance(value, type):
        shown = (f.name for f in fields(value) if f.repr and f.name not in _HOW_RULES_RUN)
        return {"type": type(value).__qualname__, **{name: described(getattr(value, name)) for name in shown}}
    if isinstance(value, (Mapping, set, frozenset, Sequence)):
        return _described_items(value)
    if isinstance(getattr(value, "model", None), nn.Module):  # PPO's reward models
        frozen = (p for p in value.model.parameters() if not p.requires_grad)
        return {"type": type(value).__qualname__, **_sample("weights", frozen)}
    return getattr(value, "__qualname__", None) or type(value).__qualname__


def _described_items(container: Mapping[Any, Any] | set[Any] | frozenset[Any] | Sequence[Any]) -> list[Any]:
    """Return the items of a mapping, set or sequence as JSON."""
    if isinstance(container, Mapping):
        # A list of pairs, so that an added key is a difference.
        pairs = sorted(public(container).items(), key=lambda pair: str(pair[0]))
        return [[str(key), described(item)] for key, item in pairs]
    if isinstance(container, (set, frozenset)):
        return sorted(map(str, container))
    return [described(item) for item in container]


def sources_of(reward: Any) -> Iterator[tuple[str, str]]:
    """Yield name and checksum of the user's code of a reward, or of each rule of a set.

    The checksum includes numbers and texts in `partial` and closures. Code of trl, trl_ext and transformers is left
    out, as it depends on the version.
    """
    if isinstance(reward, RuleSet):
        for rule in reward.rules:
            parts = (getattr(rule, field.name) for field in fields(rule))
            for one in (type(rule), *filter(callable, parts)):
                yield from sources_of(one)
        return
    function = inspect.unwrap(reward.func if isinstance(reward, partial) else reward)
    code = function if inspect.isroutine(function) or isinstance(function, type) else type(function)
    package = str(code.__module__).partition(".")[0]
    if isinstance(reward, (str, nn.Module)) or package in ("trl", "trl_ext", "transformers"):
        return
    with suppress(OSError, TypeError, ValueError):  # code typed at Python's prompt is in no file
        values = [cell.cell_contents for cell in getattr(code, "__closure__", None) or ()]
        made_with: list[Any] = [value for value in values if isinstance(value, (bool, int, float, str))]
        made_with += [reward.args, reward.keywords] if isinstance(reward, partial) else []
        yield code.__qualname__, _hash(json.dumps([inspect.getsource(code), described(made_with)]).encode())


def data_of(dataset: Any) -> dict[str, Any]:
    """Return number, columns and a checksum of evenly spaced rows; of a stream the columns and the first row."""
    if not isinstance(dataset, Dataset):
        found: dict[str, Any] = {"columns": sorted(getattr(dataset, "column_names", None) or ())}
        if isinstance(dataset, IterableDataset):
            found["first row"] = _hash(_as_json(next(iter(dataset), None)).encode())
        return found
    num_rows = len(dataset)
    chosen = sorted({i * (num_rows - 1) // max(_NUM_ROWS - 1, 1) for i in range(_NUM_ROWS)}) if num_rows else []
    plain = dataset.with_format(None)
    text = _as_json([plain[i] for i in chosen])
    return {"rows": num_rows, "columns": sorted(dataset.column_names), "content": _hash(text.encode())}


# Compared settings of transformers: sampling of rows, and the update.
_OF_TRANSFORMERS = frozenset(
    "optim optim_args optim_target_modules max_grad_norm bf16 fp16 label_smoothing_factor neftune_noise_alpha "
    "average_tokens_across_devices dataloader_drop_last train_sampling_strategy".split()
)
# Not compared: settings of TRL and ours that change place, speed or, as packing and token budgets do, only rounding.
_OPERATIONAL = frozenset(
    "model_init_kwargs trust_remote_code num_generations_eval ds3_gather_for_generation pad_to_multiple_of "
    "cache_implementation use_vllm vllm_mode vllm_model_impl vllm_enable_sleep_mode vllm_server_base_url "
    "vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization "
    "vllm_max_model_length vllm_tensor_parallel_size vllm_server_options log_completions log_multimodal "
    "num_completions_to_print log_unique_prompts log_completions_hub_repo use_transformers_continuous_batching "
    "transformers_continuous_batching_config use_transformers_paged dataset_num_proc activation_offloading "
    "packing share_prompt max_tokens_per_forward sequence_parallel eval_temperature memory "
    "memory_prompt_length global_batch memory_rehearsal memory_on_oom resume_despite save_on_signal "
    "remove_unused_columns local_rollout_forward_batch_size reward_tokens_per_forward num_sample_generations "
    "sft_model_path reward_model_path total_episodes reward_weights critic value_learning_rate "
    "value_lr_scheduler_type critic_warmup_steps overwrite layer_kernels "
    # Names in TRL 1.12 of other fields.
    "response_length num_ppo_epochs cliprange kl_coef "
    # Computed from batch, processes and steps_per_generation.
    "generation_batch_size".split()
)
# Settings that optimizer and schedule restore from a checkpoint: a new value has no effect.
RESTORED = tuple("learning_rate value_learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon".split())
# Settings of the schedule: it is built from the new values, and continues at the checkpoint's step.
REDRAWN = tuple(
    "lr_scheduler_type value_lr_scheduler_type lr_scheduler_kwargs warmup_steps critic_warmup_steps max_steps "
    "num_train_epochs".split()
)


def settings_of(args: Any) -> dict[str, Any]:
    """Return the settings that change the numbers of a run, by name."""
    theirs = {field.name for field in fields(TrainingArguments)}
    names = [f.name for f in fields(args) if (f.name in _OF_TRANSFORMERS or f.name not in theirs)]
    found = {name: getattr(args, name) for name in names if name not in _OPERATIONAL}
    per_forward, forwards = args.per_device_train_batch_size, args.gradient_accumulation_steps
    if hasattr(args, "num_generations"):  # rollouts are counted in micro-batches
        return found | {"per_device_train_batch_size": per_forward, "gradient_accumulation_steps": forwards}
    # How the samples of an optimizer step are split into forwards changes rounding only.
    return found | {"per_device_train_batch_size x gradient_accumulation_steps": per_forward * forwards}


def _as_json(rows: Any) -> str:
    return json.dumps(rows, sort_keys=True, default=lambda value: type(value).__name__)


def _tokenizer_of(processing_class: Any) -> str | None:
    """Return a checksum of vocabulary and chat template; None without a tokenizer."""
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    if not hasattr(tokenizer, "get_vocab"):
        return None
    template = getattr(processing_class, "chat_template", None)
    return _hash(json.dumps([tokenizer.get_vocab(), template], sort_keys=True).encode())


def _without_operational(config: Mapping[str, Any]) -> dict[str, Any]:
    kept = {}
    for key, value in config.items():
        # The trainer sets the ids of BOS, EOS and padding when training begins.
        if key.startswith("_") or key in _OPERATIONAL_KEYS or key.endswith(("_token_id", "token_index")):
            continue
        kept[key] = _without_operational(value) if isinstance(value, dict) else described(value)
    return kept


def _adapter_of(config: Any) -> dict[str, Any]:
    """Return the keys of an adapter's config that are compared."""
    return {key: described(getattr(config, key)) for key in _ADAPTER_KEYS if hasattr(config, key)}


def _reference_of(trainer: SavedTrainer) -> dict[str, str]:
    """Return a checksum of the reference model, which is in no checkpoint; empty if `sync_ref_model` updates it."""
    reference = getattr(trainer, "ref_model", None)
    if reference is None or getattr(trainer.args, "sync_ref_model", False):
        return {}
    return _sample("reference", reference.parameters())


def _sample(name: str, parameters: Iterator[nn.Parameter]) -> dict[str, str]:
    """Return {name: checksum} of a few values of some tensors; empty if tensors are sharded."""
    tensors = list(parameters)
    # ZeRO-3's have `ds_shape`; FSDP2's are DTensor.
    if any(p.numel() == 0 or p.is_meta or hasattr(p, "ds_shape") or isinstance(p, DTensor) for p in tensors):
        return {}
    digest = hashlib.sha256()
    for tensor in tensors[:: -(-len(tensors) // _NUM_TENSORS) or 1]:
        flat = tensor.detach().reshape(-1)
        values = flat[:: -(-flat.numel() // _NUM_VALUES)].cpu().contiguous()
        digest.update(values.view(torch.uint8).numpy().tobytes())
    return {name: digest.hexdigest()[:16]}


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
