"""The attributes of a trainer that rollouts are generated and scored by."""

from typing import Any, Protocol

import torch
from accelerate import Accelerator
from transformers import TrainerState

from trl_ext.monitor.phases import PhaseClock
from trl_ext.trainers.step.settings import StepCounts


class RolloutTrainer(Protocol):
    """A GRPO trainer while it generates and scores; the names are TRL's, but for the last four.

    Args:
        args: Its config.
        accelerator: Its accelerator.
        state: Of transformers: the steps taken.
        model: The policy; `model.training` is False in an evaluation.
        train_dataset: Its rows.
        processing_class: Its tokenizer or processor.
        num_generations, num_generations_eval: Completions of a prompt in training, and in an evaluation.
        reward_funcs, reward_func_names, reward_processing_classes: The reward functions, and a name and a tokenizer
            for each.
        reward_weights: [functions] the weight of each.
        multi_objective_aggregation: "sum_then_normalize" or "normalize_then_sum".
        use_vllm, vllm_generation: Whether vLLM generates, and TRL's object for it.
        vllm_importance_sampling_correction: Whether log-probabilities of the sampler are needed.
        use_transformers_continuous_batching, generation_config: Of transformers' ways to generate.
        rollout_func: The user's function that generates; or None.
        log_multimodal: Whether completions are logged with their images.
        is_fsdp_enabled: Whether FSDP shards the weights.
        clock: Measures the phases of a step.
        equal_groups: Which groups of the last generation have equal rewards.
        add_metric: Adds a value to the metrics of this step.
    """

    args: Any
    accelerator: Accelerator
    state: TrainerState
    model: Any
    train_dataset: Any
    processing_class: Any
    num_generations: int | None
    num_generations_eval: int | None
    reward_funcs: Any
    reward_func_names: list[str]
    reward_processing_classes: Any
    reward_weights: torch.Tensor
    multi_objective_aggregation: str
    use_vllm: bool
    vllm_generation: Any
    vllm_importance_sampling_correction: bool
    use_transformers_continuous_batching: bool
    generation_config: Any
    rollout_func: Any
    log_multimodal: bool
    is_fsdp_enabled: bool
    clock: PhaseClock
    equal_groups: Any

    def add_metric(self, name: str, value: float) -> None: ...


class AheadTrainer(RolloutTrainer, Protocol):
    """A GRPO trainer that generates the next rollouts while it trains.

    Args:
        tools: The user's tools, which cannot be used ahead.
        num_iterations: Updates on the same rollouts.
        vllm_importance_sampling_clip_max: Largest ratio of the policy's probability to the sampler's; None for any.
        counts: Tokens and metrics of the running optimizer step.
        curriculum: Chooses the next prompts; None for the order of the dataset.
        micro_step: Trained micro-steps.
        row_sampler: Returns a sampler with the order of rows of the running training.
        token_ids: Returns the token ids of prompts, as vLLM gets them.
        push_again: Lets the next generation push the weights to vLLM.
    """

    tools: Any
    num_iterations: int
    vllm_importance_sampling_clip_max: float | None
    counts: StepCounts
    curriculum: Any

    @property
    def micro_step(self) -> int: ...

    def row_sampler(self) -> Any: ...

    def token_ids(self, prompts: list[Any]) -> list[list[int]]: ...

    def push_again(self) -> None: ...

    def is_world_process_zero(self) -> bool: ...
