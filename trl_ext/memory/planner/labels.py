"""Names of techniques and of plans."""

from trl_ext.memory.job import Job, servers_of


def technique(job: Job) -> str:
    """ZeRO stage, offload and method: "ZeRO-2, all weights"."""
    stage = f"ZeRO-{job.zero_stage}" if job.zero_stage else "DDP"
    offload = {"none": "", "optimizer": " + optimizer in host memory", "all": " + all states in host memory"}
    method = {"full": "all weights", "lora": f"LoRA r={job.lora_r}", "qlora": f"QLoRA r={job.lora_r}"}[job.method]
    if job.uses_lora and job.trainer == "ppo":
        method += ", no critic" if job.critic == "none" else f", {job.critic} critic"
    elif not job.uses_lora and job.optim == "adamw_bnb_8bit":
        method += ", 8-bit Adam"
    return f"{stage}{offload[job.offload]}, {method}"


def label(job: Job, num_gpus: int) -> str:
    """A plan in a line, over the GPUs that train: "ZeRO-2, LoRA r=16, micro-batch 4 x 2, checkpointing"."""
    every = {0: "no checkpointing", 1: "checkpointing", 2: "every 2nd layer checkpointed"}.get(
        job.checkpoint_every, f"every {job.checkpoint_every}th layer checkpointed"
    )
    every += " into host memory" if job.activation_offloading else ""
    every += f", rows shared by {job.sequence_parallel} GPUs" if job.sequence_parallel > 1 else ""
    batch = f"micro-batch {job.per_device_train_batch_size} x {job.accumulation(num_gpus)}"
    name = technique(job) if num_gpus > 1 or job.zero_stage else technique(job).replace("DDP", "one GPU")
    return f"{name}, {batch}, {every}"


def vllm_label(job: Job) -> str:
    """Where vLLM runs, "vLLM over 2 GPUs"; "" without it, or on each GPU alone."""
    group = job.vllm_tensor_parallel_size
    if job.vllm_servers:
        return servers_of(job)
    return f"vLLM over {group} GPUs" if job.shares_with_vllm and group > 1 else ""
