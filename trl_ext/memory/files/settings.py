"""A plan as settings: the recipe of our scripts, DeepSpeed's JSON, accelerate's YAML, the environment.

Every key of a recipe is a field of the trainer's config or of TRL's ModelConfig (a test checks that). Bucket sizes go
into the nested block `zero_optimization`, the only place where DeepSpeed reads them.
"""

from typing import Any

import yaml

from trl_ext import resources
from trl_ext.memory.cards import Hardware
from trl_ext.memory.files.launch import FSDP
from trl_ext.memory.job import Job
from trl_ext.memory.options import LAYERS, options_of

# vLLM's sleeping allocator reads only this old name of the variable; torch still accepts it.
ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
LAUNCH_FILE, DEEPSPEED_FILE, PLAN_FILE = "accelerate.yaml", "deepspeed.json", "plan.json"


def recipe(job: Job, model: str | None, num_gpus: int, *, in_folder: bool = False) -> dict[str, Any]:
    """Return the keys of a recipe for `trl-ext reward`, `grpo` or `ppo`.

    Args:
        model: Name or folder of the model; None leaves it to the command line.
        in_folder: True if the recipe is in the plan's folder: it then names plan.json, to which the run is compared,
            the launch file and DeepSpeed's. Paths in a recipe are relative to its folder.
    """
    keys: dict[str, Any] = {
        **_models(job, model),
        "dtype": dtype_of(job),
        **({"bf16": False, "fp16": True} if job.fp16 else {"bf16": True}),
        "per_device_train_batch_size": job.per_device_train_batch_size,
        "gradient_accumulation_steps": job.accumulation(num_gpus),
        "gradient_checkpointing": job.checkpoint_every > 0,
    }
    # What a run does unless it is switched off.
    keys |= {name: False for name in ("packing", "layer_kernels") if not getattr(job, name)}
    if job.max_tokens_per_forward:
        keys["max_tokens_per_forward"] = job.max_tokens_per_forward
    if job.sequence_parallel > 1:
        keys["sequence_parallel"] = job.sequence_parallel
    if job.checkpoint_every > 1:
        keys[LAYERS] = {"every_n_layers": job.checkpoint_every}
    for option in options_of(job):
        block = keys.setdefault(option.block, {}) if option.block else keys
        block[option.name] = True
    keys |= _adapters(job) | (_generation(job, num_gpus) if job.generates else {"max_length": job.max_length})
    if job.trainer == "ppo":
        keys |= {"advantage_estimator": "reinforce_pp"} if job.critic == "none" else {"critic": job.critic}
    if job.optim != "adamw_torch_fused":
        keys["optim"] = job.optim
    if in_folder:
        keys |= {"config_file": LAUNCH_FILE} | ({"deepspeed": DEEPSPEED_FILE} if deepspeed(job) else {})
        keys |= {"memory": PLAN_FILE} | ({"memory_prompt_length": job.max_prompt_length} if job.generates else {})
    return keys


def dtype_of(job: Job) -> str:
    """Return the dtype in which weights are loaded."""
    return "float16" if job.fp16 and job.dtype == "bfloat16" else job.dtype


def _models(job: Job, model: str | None) -> dict[str, Any]:
    """Return the keys for the planned model's weights."""
    if model is None:
        return {}
    # A critic starts from the policy's weights if there is no reward model.
    critic = {"value_model": model} if job.trainer == "ppo" and job.critic == "separate" else {}
    return {"model_name_or_path": model, **critic}


def _adapters(job: Job) -> dict[str, Any]:
    if not job.uses_lora:
        return {}
    keys = {"use_peft": True, **_same(job, "lora_r", "lora_dropout")}
    keys["lora_target_modules"] = list(job.lora_target_modules)
    if job.trainer == "reward":
        keys["lora_task_type"] = "SEQ_CLS"  # with CAUSAL_LM the score head stays random
    if job.method == "qlora":
        keys |= {"load_in_4bit": True, "use_bnb_nested_quant": True}
        # Sharded 4-bit weights need the dtype of the other weights.
        keys |= {"bnb_4bit_quant_storage": job.dtype} if job.zero_stage == 3 else {}
    return keys


def _generation(job: Job, num_gpus: int) -> dict[str, Any]:
    # TRL's trainers have no prompt length; `memory_prompt_length` has the plan's, and longer rows give a warning.
    keys = _same(job, "max_completion_length", "num_generations", *(["beta"] if job.trainer == "grpo" else []))
    if job.trainer == "grpo" and job.steps_per_generation and job.steps_per_generation != job.accumulation(num_gpus):
        keys["steps_per_generation"] = job.steps_per_generation
    if job.oversample != 1:
        keys |= _same(job, "oversample")
    if job.use_vllm:
        keys |= {"use_vllm": True, "vllm_mode": job.vllm_mode}
    if job.generation_ahead:
        keys |= _same(job, "generation_ahead")
    if job.shares_with_vllm or job.vllm_servers:
        keys |= _same(job, "vllm_gpu_memory_utilization", "vllm_tensor_parallel_size")
        keys["vllm_max_model_length"] = job.sequence_tokens
    if job.shares_with_vllm:
        keys |= _same(job, "vllm_enable_sleep_mode")
    elif job.zero_stage == 3 and not job.use_vllm and not job.fsdp:
        keys["ds3_gather_for_generation"] = job.ds3_gather_for_generation
    return keys


def _same(job: Job, *names: str) -> dict[str, Any]:
    """Return settings whose key in a recipe is their name in `Job`."""
    return {name: getattr(job, name) for name in names}


def deepspeed(job: Job) -> dict[str, Any] | None:
    """Return DeepSpeed's JSON, with "auto" for values that the Trainer sets; None without DeepSpeed."""
    if not job.zero_stage or job.fsdp:
        return None
    zero: dict[str, Any] = {"stage": job.zero_stage, "reduce_bucket_size": job.reduce_bucket_size}
    if job.zero_stage < 3:
        zero["allgather_bucket_size"] = job.reduce_bucket_size
        zero |= {"overlap_comm": True} if job.overlap_comm else {}
    else:
        zero |= {
            "stage3_max_live_parameters": job.stage3_max_live_parameters,
            "stage3_max_reuse_distance": job.stage3_max_live_parameters,
            "stage3_prefetch_bucket_size": job.stage3_prefetch_bucket_size,
            "stage3_param_persistence_threshold": "auto",
            "sub_group_size": job.sub_group_size,
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    if job.zero_hpz_partition_size > 1:
        zero["zero_hpz_partition_size"] = job.zero_hpz_partition_size
    if job.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if job.offload == "all":
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    owned: dict[str, Any] = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    owned |= {"gradient_clipping": "auto", "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
    untested = {"zero_allow_untested_optimizer": True} if job.optim == "adamw_bnb_8bit" else {}
    return {**owned, **untested, "zero_optimization": zero}


def accelerate(job: Job, num_gpus: int) -> dict[str, Any]:
    """Return accelerate's launch file. DeepSpeed's file is in the recipe's key `deepspeed`: it may be named only once.

    DeepSpeed on one GPU also needs the rank that torch's launcher sets: without it DeepSpeed asks MPI.
    """
    if job.fsdp:
        shipped = yaml.safe_load(resources.accelerate_config(FSDP[job.offload]).read_text(encoding="utf-8"))
        return {**shipped, "num_processes": num_gpus}
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU" if num_gpus > 1 or job.zero_stage else "NO",
        "mixed_precision": "no",
        "num_machines": 1,
        "num_processes": num_gpus,
    }


def to_replace(job: Job, *, names_model: bool = True) -> dict[str, str]:
    """Return the options of the launch line that the user must fill in, each with its placeholder (see `MEANINGS`)."""
    options = {} if names_model else dict.fromkeys(_models(job, "MODEL"), "MODEL")
    options["dataset_name"] = "DATASET"
    if job.trainer == "ppo" and job.reward_model != "none":
        options |= {"adapter": {"reward_adapter": "ADAPTER"}, "copy": {"reward_model": "REWARD_MODEL"}}[
            job.reward_model
        ]
    elif job.reward_model == "copy":
        options["reward_model_name_or_path"] = "REWARD_MODEL"
    elif job.generates:
        options["rules"] = "RULES.yaml"
    return {**options, "output_dir": "OUT"}


MEANINGS = {
    "MODEL": "your model, a name on the hub or a folder",
    "DATASET": "your rows, a name on the hub, a folder or a file; `trl-ext check` shows eight of them",
    "ADAPTER": "the reward model, a LoRA of the same backbone, as `trl-ext reward` saves it; the plan counts it",
    "REWARD_MODEL": "the reward model, a name on the hub or a folder; the plan counts it as large as the policy",
    "RULES.yaml": "what scores a completion, a file with `rules:`; or give `rules` in the recipe, or --reward_funcs",
    "OUT": "the folder of the run",
    "ADDRESS": "the address of the first machine, which the others can reach",
}


def launch_lines(job: Job, folder: str, hardware: Hardware, *, names_model: bool = True) -> list[str]:
    """Return the commands that start the run from a plan's folder, one for each machine; placeholders are in capitals.

    Args:
        names_model: True if the recipe names a model, False if the plan is for a size.
    """
    variables = "".join(f"{name}={value} " for name, value in (ALLOCATOR if job.expandable_segments else {}).items())
    files = f"--config_file {folder}/accelerate.yaml --config {folder}/recipe.yaml"
    times = {"reward_model": job.num_reward_models, "reward_adapter": job.num_reward_models}
    theirs = " ".join(
        f"--{option} {' '.join([word] * times.get(option, 1))}"
        for option, word in to_replace(job, names_model=names_model).items()
    )
    servers = f" --vllm_servers {job.vllm_servers}" if job.vllm_servers else ""
    train = f"{variables}trl-ext {job.trainer} {files}{servers} {theirs}"
    if hardware.num_machines > 1:
        counts = f"--num_machines {hardware.num_machines} --num_processes {hardware.num_gpus}"
        first = "--main_process_ip ADDRESS --main_process_port 29500"
        return [f"{train} {counts} --machine_rank {rank} {first}" for rank in range(hardware.num_machines)]
    return [train]
