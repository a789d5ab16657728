"""Launch files, accelerate's YAML and DeepSpeed's JSON: the shipped ones, and reading them into fields of `Job`."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from trl_ext import resources
from trl_ext.errors import ConfigError
from trl_ext.memory.job import Job
from trl_ext.memory.models.shapes import ModelShape

# DeepSpeed's defaults for keys missing in its file (version 0.19), in elements.
DEFAULTS = {
    "reduce_bucket_size": 500_000_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "sub_group_size": 1_000_000_000,
    "zero_hpz_partition_size": 1,
}
IN_HOST_MEMORY = ("cpu", "nvme")
# Shipped launch files by ZeRO stage and offload.
SHIPPED = {(0, "none"): "multi_gpu", (1, "none"): "zero1", (2, "none"): "zero2", (3, "none"): "zero3"}
SHIPPED |= {(2, "optimizer"): "zero2_offload", (3, "all"): "zero3_offload"}
FSDP = {"none": "fsdp2", "all": "fsdp2_offload"}  # shipped launch files of FSDP2 by offload
Engine = dict[str, Any]  # DeepSpeed's JSON; {"fsdp": {"offload": ...}} under FSDP2


def launched_with(job: Job) -> str:
    """Return the option for a shipped launch file, such as "--config_file zero3"; "" if none fits."""
    file = FSDP[job.offload] if job.fsdp else SHIPPED.get((job.zero_stage, job.offload))
    return f"--config_file {file}" if file else ""


def fsdp_engine(version: int, *, reshards: bool, offloads: bool) -> Engine:
    """Return FSDP's settings as the engine of a run; raise ConfigError if plans do not cover this way of sharding.

    Args:
        reshards: True if weights are freed after each forward.
        offloads: True if they wait in host memory.
    """
    if version != 2 or not reshards:
        raise ConfigError(
            f"fsdp_version is {version}, fsdp_reshard_after_forward is {str(reshards).lower()}: only version 2 that "
            "reshards is planned. Launch with --config_file fsdp2."
        )
    return {"fsdp": {"offload": "all" if offloads else "none"}}


def read_accelerate(file: str) -> tuple[int | None, Engine | None]:
    """Read processes and DeepSpeed's or FSDP's settings from an accelerate file, or from a shipped one by its name.
    Either is None if the file has none.

    Raises:
        ConfigError: There is no such file, it is not YAML, or plans do not cover its FSDP settings.
    """
    path = Path(file)
    is_name = not path.is_file() and path.name == file and not path.suffix
    path = resources.accelerate_config(file) if is_name else path
    keys = _read(path, yaml.safe_load)
    if keys.get("distributed_type") == "FSDP":
        own = keys.get("fsdp_config") or {}
        version, reshards = int(own.get("fsdp_version", 1)), own.get("fsdp_reshard_after_forward") in (True, "true")
        offloads = own.get("fsdp_offload_params") in (True, "true")
        return keys.get("num_processes"), fsdp_engine(version, reshards=reshards, offloads=offloads)
    inner = keys.get("deepspeed_config") or {}
    if not inner:
        return keys.get("num_processes"), None
    if inner.get("deepspeed_config_file"):
        # Relative to the current folder, as in accelerate, or else to the file's folder.
        named = inner["deepspeed_config_file"]
        return keys.get("num_processes"), read_deepspeed(named if Path(named).is_file() else str(path.parent / named))
    zero: Engine = {"stage": int(inner.get("zero_stage", 2))}
    for part in ("optimizer", "param"):
        if inner.get(f"offload_{part}_device", "none") != "none":
            zero[f"offload_{part}"] = {"device": inner[f"offload_{part}_device"]}
    owned = {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}, "gradient_clipping": "auto"}
    return keys.get("num_processes"), {**owned, "zero_optimization": zero}


def read_deepspeed(file: str) -> Engine:
    """Read DeepSpeed's settings from its JSON; raise ConfigError if there is no such file or it is not JSON."""
    return _read(Path(file), json.loads)


def zero_stage(engine: Mapping[str, Any] | None) -> int:
    """Return the stage in DeepSpeed's settings; 0 without DeepSpeed."""
    return int(zero_optimization(engine).get("stage", 0))


def engine_fields(engine: Mapping[str, Any] | None, shape: ModelShape) -> dict[str, Any]:
    """Return `Job`'s fields that the engine decides: stage, offload and, with DeepSpeed, sizes in elements. The
    Trainer fills "auto" from the hidden size."""
    zero = zero_optimization(engine)
    if engine and "fsdp" in engine:
        return {"zero_stage": 3, "fsdp": True, **engine["fsdp"]}
    if not zero:
        return {"zero_stage": 0, "offload": "none"}
    auto = {"reduce_bucket_size": shape.hidden**2, "stage3_prefetch_bucket_size": int(0.9 * shape.hidden**2)}
    sizes = {}
    for name, default in DEFAULTS.items():
        size = zero.get(name, default)
        sizes[name] = auto.get(name, default) if size == "auto" else int(size)
    on_host = {
        part for part in ("optimizer", "param") if (zero.get(f"offload_{part}") or {}).get("device") in IN_HOST_MEMORY
    }
    offload = "all" if "param" in on_host else "optimizer" if on_host else "none"
    # ZeRO-3 overlaps by default, with one bucket; stage 0 has none.
    overlaps = zero_stage(engine) in (1, 2) and bool(zero.get("overlap_comm"))
    return {"zero_stage": zero_stage(engine), "offload": offload, "overlap_comm": overlaps, **sizes}


def zero_optimization(engine: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return DeepSpeed's settings of ZeRO; empty without DeepSpeed."""
    return (engine or {}).get("zero_optimization") or {}


def _read(path: Path, load: Callable[[str], Any]) -> dict[str, Any]:
    try:
        keys = load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"There is no file {path}. Check the path.") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error
    if not isinstance(keys, dict):
        raise ConfigError(f"{path} holds no keys. Give a launch file.")
    return keys
