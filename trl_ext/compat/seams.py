"""The seams: every method or function of another project that we override, or call below its public surface.

Each stands in `SEAMS` with the parameters that we count on; one test walks the table, so that an upgrade fails by name
in seconds.
"""

import inspect
from dataclasses import dataclass
from importlib import import_module
from typing import Any


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
        "trl.trainer.grpo_trainer:GRPOTrainer.log",
        ("logs", "start_time"),
        "a full disk does not end training; clears `_metrics` and writes completions where rank 0 alone is",
    ),
    Seam("trl.trainer.reward_trainer:RewardTrainer.log", ("logs", "start_time"), "as GRPO's"),
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
        "its buffer of micro-batches is planned into forwards; runs the self-check before the first generation",
    ),
    Seam(
        "trl.trainer.grpo_trainer:GRPOTrainer._calculate_rewards",
        ("inputs", "prompts", "completions", "completion_ids_list"),
        "lets all ranks fail together when a reward raises on one; tokenizers of reward models have a stand-in",
    ),
    Seam(
        "trl.trainer.grpo_trainer:GRPOTrainer._generate",
        ("prompts",),
        "timed as the phase `generate`; greedy in evaluation when asked; its 2nd and 4th results are scored early",
    ),
    Seam(
        "trl.trainer.grpo_trainer:GRPOTrainer._generate_and_score_completions",
        ("inputs",),
        "notes the rows whose columns the rules read; takes out `old_per_token_logps`, `importance_sampling_ratio` "
        "and metrics of `sampling/` where the update gives them",
    ),
    Seam(
        "trl.trainer.grpo_trainer:GRPOTrainer._load_optimizer_and_scheduler",
        ("checkpoint",),
        "called with the checkpoint to resume from; the state of rules and rollouts is beside the optimizer's",
    ),
    Seam(
        "trl.trainer.grpo_trainer:GRPOTrainer._save_checkpoint",
        ("model", "trial"),
        "writes into a folder beside its place, which is renamed when whole",
    ),
    Seam("trl.trainer.reward_trainer:RewardTrainer._save_checkpoint", ("model", "trial"), "as above"),
    Seam("transformers:Trainer.train", ("resume_from_checkpoint", "trial"), "gets a whole checkpoint or none"),
    Seam(
        "transformers:Trainer._determine_best_metric",
        ("metrics", "trial"),
        "raises KeyError for a `metric_for_best_model` that the metrics lack",
    ),
    Seam(
        "transformers:Trainer.create_scheduler",
        ("num_training_steps", "optimizer"),
        "made once, before accelerate prepares: PPO's critic gets a factor of its own",
    ),
    Seam("transformers:Trainer._clip_grad_norm", ("model",), "clips all at one norm: PPO's critic may have its own"),
    Seam(
        "transformers:Trainer._init_training_state",
        ("max_steps", "num_update_steps_per_epoch", "num_train_epochs", "resume_from_checkpoint", "trial"),
        "given by place; returns epochs and micro-batches to leave out: of a stream, ours",
    ),
    Seam(
        "trl.trainer.callbacks:SyncRefModelCallback.sync_target_model",
        ("model", "target_model", "alpha"),
        "moves the parameters of the reference, and nothing else: checkpoints hold them",
    ),
    Seam("transformers:Trainer._run_epoch", (), "called once an epoch, and not at all when no step is left"),
    Seam("transformers:Trainer._get_output_dir", ("trial",), "names the folder beside, while a checkpoint is written"),
    Seam("transformers:Trainer._push_from_checkpoint", ("checkpoint_folder",), "called when a checkpoint is whole"),
    Seam("transformers:Trainer.save_model", ("output_dir",), "a full disk is kept until all processes have met"),
    Seam("transformers:Trainer._save_optimizer_and_scheduler", ("output_dir",), "as above"),
    Seam("transformers:Trainer._save_scaler", ("output_dir",), "as above"),
    Seam("transformers:Trainer._save_rng_state", ("output_dir",), "as above"),
    Seam("transformers:Trainer.create_model_card", ("model_name",), "as above"),
    Seam(
        "trl.trainer.base_trainer:_BaseTrainer.create_model_card",
        ("model_name", "dataset_name", "tags"),
        "writes README.md; its sentence `This model is a fine-tuned version of ...` and its heading `### Framework "
        "versions` are found there",
    ),
    Seam("transformers.training_args:TrainingArguments.to_dict", (), "what trackers get loses its secrets"),
    Seam("transformers.trainer:DEFAULT_PROGRESS_CALLBACK", (), "a notebook's, for which ProgressLine stands as well"),
    Seam("transformers:Trainer.add_callback", ("callback",), "a ProgressLine takes the place of the one there"),
    Seam(
        "transformers.trainer_utils:sort_checkpoints",
        ("output_dir", "use_mtime"),
        "the order in which save_total_limit removes checkpoints",
    ),
    Seam(
        "trl.trainer.grpo_trainer:GRPOTrainer._get_train_sampler",
        ("dataset",),
        "a sampler that can be put at an epoch",
    ),
    Seam(
        "trl.trainer.grpo_trainer:GRPOTrainer._get_dataloader",
        ("dataset", "description", "batch_size", "sampler_fn", "is_training"),
        "`Training` brings as many rows as are sampled",
    ),
    Seam("trl.trainer.utils:nanstd", ("tensor", "dim"), "which groups have variance"),
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
        "looks at the rows that it is given; its seconds are a phase of their own; in PPO it collects the critic's "
        "errors and leaves training's random numbers alone",
    ),
    Seam(
        "trl.trainer.grpo_trainer:GRPOTrainer.prediction_step",
        ("model", "inputs", "prediction_loss_only", "ignore_keys"),
        "gets the rows of an evaluation batch, which PPO may answer greedily before; what it notes of completions in "
        "`_logs` is this batch's alone meanwhile",
    ),
    Seam(
        "trl.trainer.grpo_trainer:GRPOTrainer.get_train_dataloader",
        (),
        "refuses too few rows for one step; here, in `__init__` and for its table TRL counts the completions of a "
        "generation by `args.generation_batch_size`, which is larger when oversampling",
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
        "trl.trainer.reward_trainer:RewardTrainer._save",
        ("output_dir", "state_dict"),
        "writes beside the weights what the model was trained to read",
    ),
    Seam(
        "transformers.utils.hub:cached_file",
        ("path_or_repo_id", "filename"),
        "finds that file in a folder or on the hub; OSError where there is none",
    ),
    Seam(
        "trl.trainer.reward_trainer:RewardTrainer.get_train_dataloader",
        (),
        "under a token budget, rows planned over the pairs that its sampler would deal out; refuses too few",
    ),
    Seam(
        "trl.trainer.reward_trainer:RewardTrainer.get_batch_samples",
        ("epoch_iterator", "num_batches", "device"),
        "the one place where a rank sees all batches of an optimizer step: agree on pairs and forwards",
    ),
    Seam("trl.trainer.grpo_trainer:GRPOTrainer.get_batch_samples", (), "where a stream's own code may raise"),
    Seam("trl.trainer.reward_trainer:RewardTrainer.training_step", (), "timed as the phase `update`"),
    Seam(
        "trl.trainer.reward_trainer:RewardTrainer._load_optimizer_and_scheduler",
        ("checkpoint",),
        "called with the checkpoint to resume from, when its state is loaded; `num_tokens` goes on from there",
    ),
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
    Seam("trl.trainer.utils:_CHUNKED_LOGPROB_CHUNK_SIZE", (), "width of that head's tiles; narrower on a processor"),
    Seam("trl.trainer.utils:is_async_callable", (), "guards asynchronous reward functions as such"),
    Seam("trl.trainer.grpo_trainer:GRPOTrainer._tokenize_prompts", ("prompts",), "measures the longest prompt"),
    Seam("trl.trainer.grpo_config:GRPOConfig.__post_init__", (), "checks our own fields after TRL's"),
    Seam(
        "trl.trainer.grpo_trainer:GRPOTrainer._compute_loss",
        ("model", "inputs"),
        "called once a forward with the rows of that forward, its loss weighted; what it logs through `accelerator`, "
        "whose `gather`, `gather_for_metrics` and `reduce` are this rank's meanwhile, is merged over the step; in PPO "
        "advantages are [B, T], beta is 0 meanwhile, the value loss comes on top",
    ),
    Seam("trl.trainer.utils:FusedCausalLMOutput", ("log_probs", "entropy"), "values stand beside its fields"),
    Seam(
        "trl.trainer.grpo_trainer:GRPOTrainer.compute_loss",
        ("model", "inputs", "return_outputs", "num_items_in_batch"),
        "a micro-step goes forward by forward, each with its backward",
    ),
    Seam(
        "trl.trainer.utils:disable_dropout_in_model", ("model",), "the value model, where the policy has none either"
    ),
    Seam(
        "trl.trainer.utils:print_prompt_completions_sample",
        ("prompts", "completions", "rewards", "advantages", "step"),
        "PPO's samples",
    ),
    Seam("accelerate.utils:map_pytorch_optim_to_deepspeed", ("optimizer",), "the second engine's, in host memory"),
    Seam("accelerate.utils.memory:should_reduce_batch_size", ("exception",), "which errors are out of memory"),
    Seam("accelerate.utils.memory:clear_device_cache", ("garbage_collection",), "gives back what a forward held"),
    Seam("deepspeed.ops.op_builder.builder:OpBuilder.jit_load", ("verbose",), "says that it compiles a helper"),
    Seam("torch.utils.cpp_extension:_get_build_directory", ("name", "verbose"), "is a helper of DeepSpeed's built?"),
    Seam("trl.models.utils:prepare_deepspeed", ("model", "accelerator"), "reference, reward and value models"),
    Seam(
        "peft.tuners.tuners_utils:check_target_module_exists",
        ("config", "key"),
        "whether a user's config trains the score head",
    ),
    Seam("peft.tuners.tuners_utils:BaseTunerLayer.set_adapter", ("adapter_names",), "the state that roles switch"),
    Seam(
        "transformers:PreTrainedModel.gradient_checkpointing_enable",
        ("gradient_checkpointing_kwargs",),
        "the one way by which trainers switch checkpointing on; roles are pinned in its kwargs",
    ),
    Seam("trl:TrlParser.set_defaults_with_config", (), "numbers of a recipe become text where text belongs"),
    Seam(
        "trl:TrlParser.parse_args_and_config",
        ("args", "return_remaining_strings", "fail_with_unknown_args", "separate_remaining_strings"),
        "strict parsing in the scripts",
    ),
    Seam("trl:TrlParser.set_defaults_with_config", ("kwargs",), "a recipe's launch file is no field of a dataclass"),
    Seam("accelerate.commands.launch:launch_command_parser", ("subparsers",), "`trl-ext grpo` reads its options"),
    Seam("accelerate.commands.launch:launch_command", ("args",), "`trl-ext grpo` starts the processes with it"),
    Seam(
        "accelerate:DistributedDataParallelKwargs",
        ("gradient_as_bucket_view",),
        "the accelerator's `ddp_handler`: DDP's gradients live in its buckets",
    ),
    Seam(
        "torch.distributed:monitored_barrier",
        ("group", "timeout", "wait_all_ranks"),
        "names the processes that do not come; what it says is read, and its processes other than 0 heed the group's "
        "timeout only",
    ),
    Seam(
        "torch.distributed:ProcessGroup.set_timeout",
        (),
        "`ddp_timeout` on CPUs, where transformers does not pass it on; of C++, so without names of parameters",
    ),
    Seam("torch.distributed:new_group", ("ranks", "timeout", "backend"), "groups beside the one of training"),
    Seam(
        "transformers.trainer_jit_checkpoint:CheckpointManager.setup_signal_handler",
        (),
        "taken back: its `_original_sigterm_handler` is what was there before",
    ),
    Seam(
        "torch.distributed.run:get_args_parser",
        (),
        "knows `signals_to_handle`, which `trl-ext grpo` sets: it passes SIGTERM and Ctrl-C on itself",
    ),
    Seam(
        "transformers:AttentionInterface.register",
        ("key", "value"),
        "an implementation registered again under its own name, which flash-attention and continuous batching read",
    ),
    Seam("transformers:AttentionMaskInterface.register", ("key", "value"), "its masks; a packed row needs the window"),
    Seam(
        "transformers.modeling_flash_attention_utils:lazy_import_flash_attention",
        ("implementation",),
        "the second of the functions that it returns is flash-attention's for rows of different lengths",
    ),
    Seam(
        "transformers.utils.generic:is_flash_attention_requested",
        ("requested_attention_implementation",),
        "by name; such an implementation reads its window from the keyword `sliding_window`, all others from the mask",
    ),
    Seam(
        "transformers.generation.continuous_batching.utils:attn_mask_is_needed",
        ("config",),
        "continuous batching knows attention implementations by their names, which packing therefore keeps",
    ),
    Seam(
        "trl.generation.vllm_client:VLLMClient.__init__",
        ("base_url", "host", "server_port", "group_port", "connection_timeout"),
        "`vllm_server_base_url` may name several servers, which one client of ours serves",
    ),
    Seam(
        "trl.generation.vllm_client:VLLMClient.check_server", ("total_timeout", "retry_interval"), "asks all servers"
    ),
    Seam("trl.generation.vllm_client:VLLMClient.get_world_size", (), "the workers of all servers"),
    Seam(
        "trl.generation.vllm_client:VLLMClient._post",
        ("url",),
        "all that the client sends; prompts are divided, and each server joins the group at a rank of its own",
    ),
    Seam(
        "transformers.integrations.flash_attention:flash_attention_forward",
        ("module", "query", "key", "value", "attention_mask", "dropout", "scaling", "sliding_window"),
        "the arguments of every attention function; looks the name in the config up",
    ),
    Seam(
        "transformers.masking_utils:sdpa_mask",
        ("local_size", "use_vmap"),
        "arguments of every mask function: the window, and whether a model lays functions of its own over the mask",
    ),
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
    found = resolve(seam.where)
    names = list(inspect.signature(found).parameters) if seam.parameters and callable(found) else []
    present = [p for p in seam.parameters if p in names]
    in_order = present == sorted(present, key=names.index)
    return [p for p in seam.parameters if p not in names] or ([] if in_order else list(seam.parameters))
