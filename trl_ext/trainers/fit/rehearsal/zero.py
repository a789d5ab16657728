"""DeepSpeed without its step: an engine's backward runs, its optimizer does not, and its gradients are dropped.

What is reset here is what the engine's own `step` resets when it skips an overflow (DeepSpeed 0.19, ZeRO 1 to 3).
"""

from typing import Any

# What is called or cleared below. Its optimizer for bf16 gradients that are added in fp32 has none of it.
_STAGE_1_OR_2 = ("averaged_gradients", "all_grad_tensors", "_release_preflattened_grad_buffers", "micro_step_id")
_STAGE_3 = ("averaged_gradients", "grad_partitions_flat_buffer", "_offload_boundary_param_ids", "micro_step_id")


def drop_gradients(engine: Any) -> None:
    """Leave the engine as it was before its backwards."""
    if engine.zero_optimization_partition_weights():
        _drop_stage_3(engine.optimizer)
    else:
        _drop_stage_1_or_2(engine.optimizer)
    engine.zero_grad()


def why_not(engine: Any) -> str:
    """A reason why this engine's gradients cannot be dropped; "" if they can."""
    needed = _STAGE_3 if engine.zero_optimization_partition_weights() else _STAGE_1_OR_2
    if not engine.zero_optimization() or not all(hasattr(engine.optimizer, name) for name in needed):
        return f"DeepSpeed's {type(engine.optimizer).__name__} keeps gradients where only its step clears them"
    if engine.zenflow:
        return "ZenFlow's optimizer works while backward runs"
    if getattr(engine.optimizer, "swap_optimizer", False):
        return "the optimizer is offloaded to disk, where backward writes its gradients"
    return ""


def _drop_stage_1_or_2(optimizer: Any) -> None:
    optimizer._wait_for_offload_copies()
    optimizer.zero_grad(set_to_none=True)
    optimizer._release_preflattened_grad_buffers()
    for gradients in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
        for group in gradients:
            gradients[group] = None
    optimizer.micro_step_id = -1  # the next forward begins with micro-step 0
    if optimizer.cpu_offload:
        optimizer.reset_cpu_buffers()
        optimizer.accumulated_grads_in_cpu.clear()
        optimizer._offload_accumulated_param_ids.clear()
        _zero_master_gradients(optimizer.single_partition_of_fp32_groups)


def _drop_stage_3(optimizer: Any) -> None:
    optimizer.zero_grad(set_to_none=True)  # and the micro-step is 0 again, which overwrites instead of adding
    optimizer.averaged_gradients.clear()
    # A weight without gradient in the first real backward must find none.
    optimizer.grad_partitions_flat_buffer.zero_()
    optimizer._offload_boundary_param_ids.clear()
    if optimizer.offload_optimizer:
        optimizer.reset_cpu_buffers()
        _zero_master_gradients(optimizer.fp32_partitioned_groups_flat)


def _zero_master_gradients(groups: Any) -> None:
    for group in groups:
        if group.grad is not None:
            group.grad.zero_()
