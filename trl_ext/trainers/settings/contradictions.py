"""Contradictions between settings of a run, for all trainers."""

import math

from trl_ext.compat.liger import HEADS
from trl_ext.memory.contradictions import SHARED, Row

# fmt: off
RUN: tuple[Row, ...] = (
    *SHARED,
    (lambda max_tokens_per_forward, packing: max_tokens_per_forward is not None and packing is False,
     "padded batches have no such bound. Remove one of the two."),
    (lambda layer_kernels, packing: layer_kernels and packing is False,
     "the kernels are used where rows are packed. Remove one of the two."),
    (lambda use_liger_kernel, layer_kernels: use_liger_kernel and layer_kernels is False,
     "both are about the same layers. Remove one of the two."),
    (lambda use_liger_kernel, liger_kernel_config, layer_kernels:
        use_liger_kernel and any((liger_kernel_config or {}).get(name) for name in HEADS),
     f"layers are replaced and no head. Leave {', '.join(HEADS)} out of liger_kernel_config."),
    (lambda global_batch, memory: global_batch and memory is None,
     "it has no effect without memory. Set memory='auto', or remove it."),
    (lambda generation_ahead, vllm_importance_sampling_correction:
        generation_ahead and not vllm_importance_sampling_correction,
     "samples of older weights need the correction. Leave the second out."),
    (lambda use_transformers_continuous_batching, repetition_penalty:
        use_transformers_continuous_batching and repetition_penalty != 1,
     "transformers drops the penalty there. Remove one of the two."),
    (lambda max_tokens_per_forward, max_completion_length:
        max_tokens_per_forward is not None and max_tokens_per_forward <= (max_completion_length or math.inf),
     "a forward cannot hold one completion and its prompt. Raise the first or lower the second."),
    (lambda oversample, scale_rewards: oversample != 1 and scale_rewards == "batch",
     "the scale of the whole batch counts groups that oversampling leaves out. Set one of the two to its default."),
    (lambda oversample, multi_objective_aggregation:
        oversample != 1 and multi_objective_aggregation == "normalize_then_sum",
     "the sum over the whole batch counts groups that oversampling leaves out. Set one of the two to its default."),
    (lambda sync_ref_model, beta: sync_ref_model and beta == 0,
     "without a KL penalty there is no reference to move. Leave sync_ref_model out, or set beta."),
    (lambda load_best_model_at_end, eval_strategy: load_best_model_at_end and eval_strategy == "no",
     "without evaluation no checkpoint is the best. Set eval_strategy and save_strategy, or leave the first out."),
)
# fmt: on
