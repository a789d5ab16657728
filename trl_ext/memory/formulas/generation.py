"""Memory during generation: the key/value cache of transformers' generate, or vLLM's share.

vLLM on the training GPUs takes its share of the card's *total* memory, after the trainer has loaded its model. Asleep
it keeps CUDA graphs, its context and buffers (RESIDUE, estimated) and returns the rest.
"""

from trl_ext.errors import ConfigError, refuse_first
from trl_ext.memory.cards import Card, Hardware
from trl_ext.memory.job import Job, servers_of
from trl_ext.memory.models.shapes import ModelShape, kv_bytes_per_token, lm_params
from trl_ext.memory.units import GIB, gib, in_gib

# A static cache has a multiple of so many tokens: decoding is compiled for each length, which takes half a minute.
CACHE_STEP_TOKENS = 256
RESIDUE_BYTES = 1.5 * GIB  # of a sleeping vLLM (estimated: 1 to 3 GiB for small engines)
WORKSPACE_BYTES = 1.5 * GIB  # vLLM's activations and CUDA graphs within its share (estimated)


def cache_bytes(shape: ModelShape, job: Job, num_gpus: int) -> float:
    """Bytes of the keys and values of all completions that one GPU generates at once, at full length.

    transformers grows the cache by concatenation, so one layer exists twice. Llama-3-8B, 16 completions of 2,048
    tokens: 4.1 GiB.
    """
    tokens = job.generated_at_once(num_gpus) * job.sequence_tokens
    return tokens * kv_bytes_per_token(shape) * (1 + 1 / shape.num_layers)


def static_cache_bytes(shape: ModelShape, job: Job, num_gpus: int) -> float:
    """Bytes of the same completions in a static cache, whose length is a multiple of CACHE_STEP_TOKENS."""
    length = -(-job.sequence_tokens // CACHE_STEP_TOKENS) * CACHE_STEP_TOKENS
    return job.generated_at_once(num_gpus) * length * kv_bytes_per_token(shape)


def vllm_bytes(card: Card, job: Job) -> float:
    """Bytes of vLLM's share of a card while it generates."""
    return job.vllm_gpu_memory_utilization * card.total_gib * GIB


def vllm_weight_bytes(shape: ModelShape, job: Job) -> float:
    """Bytes of vLLM's copy of the weights on one GPU."""
    return 2.0 * lm_params(shape) / job.vllm_tensor_parallel_size


def vllm_cache_tokens(shape: ModelShape, card: Card, job: Job) -> int:
    """Tokens whose keys and values fit into vLLM's share; 0 or less if vLLM cannot start."""
    free = vllm_bytes(card, job) - vllm_weight_bytes(shape, job) - WORKSPACE_BYTES
    return int(free * job.vllm_tensor_parallel_size / kv_bytes_per_token(shape))


def check_vllm(shape: ModelShape, job: Job, hardware: Hardware) -> None:
    """Raise ConfigError if vLLM's groups do not divide a machine's GPUs, or its share has no room for a completion."""
    if not job.use_vllm or (job.vllm_mode == "server" and not job.vllm_servers):
        return
    check_group(shape, job, hardware)
    tokens = vllm_cache_tokens(shape, hardware.card, job)
    if tokens < job.sequence_tokens:
        share, total = job.vllm_gpu_memory_utilization, hardware.card.total_gib
        raise ConfigError(
            f"vLLM with vllm_gpu_memory_utilization {share} of {total} GiB gets "
            f"{gib(vllm_bytes(hardware.card, job)):.1f} GiB; its weights take {in_gib(vllm_weight_bytes(shape, job))} "
            f"over {job.vllm_tensor_parallel_size} GPUs, which leaves {max(tokens, 0)} tokens of cache for "
            f"completions of {job.sequence_tokens}. Raise the share or vllm_tensor_parallel_size, or leave both out."
        )


def check_group(shape: ModelShape, job: Job, hardware: Hardware) -> None:
    """Raise ConfigError if vLLM's groups exceed a machine, or do not divide its GPUs or the model's heads."""
    group, here = job.vllm_tensor_parallel_size, hardware.gpus_per_machine
    size = max(group, 1)
    refuse_first(
        {
            f"{servers_of(job)} together with training over {hardware.num_machines} machines is not planned. Plan one "
            "machine, or vllm_mode=colocate.": job.vllm_servers and hardware.num_machines > 1,
            f"vllm_tensor_parallel_size {group} does not divide a machine's {here} GPUs. Use a divisor.": (
                group < 1 or (not job.vllm_servers and here % size)
            ),
            f"vllm_tensor_parallel_size {group} does not divide the {shape.num_heads} attention heads of "
            f"{shape.name}. Use a divisor.": shape.num_heads % size,
        }
    )
