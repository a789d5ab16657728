"""The seams: every name of another project that we override, or use below its public surface.

A test walks the table, and another test finds names that it lacks. With untested versions
`trl_ext/compat/versions.py` walks it before a run, so that an upgrade fails by name and in seconds.
"""

import dis
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

# A module or class, and below it the names that we use: a function with the parameters that we pass by name or rely
# on, in this order; an attribute; or a method with keys of the dictionary that it returns. After the colon: the use.
# An equals sign before the colon: our code computes that value as well, and a test compares an example with theirs.
_TABLE = """
trl.trainer.grpo_trainer:GRPOTrainer
    __init__(model, reward_funcs, args, train_dataset, eval_dataset, processing_class): checks data; installs packing
    _get_per_token_logps_and_entropies(model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy,
        compute_aux_loss, pixel_values)=: the one method that carries the old-policy, the reference and the loss
        forward; packed here
    _prepare_inputs(generation_batch): plans its micro-batches into forwards; self-check before the first generation
    _step: counts micro-batches, and with that when rollouts are generated; saved with a checkpoint
    _buffered_inputs: the micro-batches of a generation, which are planned together; saved with a checkpoint
    _calculate_rewards(inputs, prompts, completions, completion_ids_list): all ranks fail together when a reward raises
    _generate(prompts): timed as the phase `generate`; greedy in evaluation when asked; its 2nd and 4th results are
        scored early, its 7th are images
    _generate_and_score_completions(inputs): called once a generation; notes the rows whose columns the rules read;
        with a curriculum gets the rows that it draws; takes out
        `old_per_token_logps`, `importance_sampling_ratio` and metrics of `sampling/` where the update gives them
    _generate_and_score_completions['prompt_ids', 'prompt_mask', 'completion_ids', 'completion_mask']=: padded rows,
        which are planned into forwards; PPO masks what nothing could score
    _generate_and_score_completions['advantages']=: PPO writes its own here; a row of zero advantage may be left out
    _generate_and_score_completions['frac_reward_zero_std']=: of groups without variance; rounding is none here
    _generate_and_score_completions['num_items_in_batch']=: what a loss over tokens is divided by
    _generate_and_score_completions['old_per_token_logps', 'sampling_per_token_logps', 'importance_sampling_ratio']=:
        the policy before the update, where its first forward does not give it
    _generate_and_score_completions['ref_per_token_logps']: PPO's penalty is in its rewards and not in the loss
    _generate_and_score_completions['pixel_values', 'image_grid_thw', 'num_images', 'mm_token_type_ids']: the images of
        the rows, which the update holds by rows
    _generate_and_score_completions['tool_mask']: tokens of tools, which the policy has not sampled
    _load_optimizer_and_scheduler(checkpoint): also loads the state of rules and rollouts from the checkpoint
    _save_checkpoint(model, trial): writes into another folder, which is renamed when complete
    _get_train_sampler(dataset): a sampler that can be put at an epoch
    _get_dataloader(dataset, description, batch_size, sampler_fn, is_training): gets as many rows as are sampled
    _compute_loss(model, inputs)=: called once a forward with the rows of that forward, its loss weighted; what it
        logs through `accelerator`, whose `gather`, `gather_for_metrics` and `reduce` are this rank's meanwhile, is
        merged over the step; in PPO advantages are [B, T], beta is 0 meanwhile, the value loss is added
    compute_loss(model, inputs, return_outputs, num_items_in_batch): runs a micro-step forward by forward
    training_step(model, inputs, num_items_in_batch): timed as the phase `update`; sums packing counters after a step
    evaluate(eval_dataset, ignore_keys, metric_key_prefix): looks at the rows that it is given; its seconds are a
        separate phase; in PPO it collects the critic's errors and draws the same random numbers every time
    evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix): rewards of all its
        batches are averaged over their rows; its sampler repeats a row `num_generations_eval` times
    _log_metric(name, value): given to reward functions; swapped in an evaluation
    prediction_step(model, inputs, prediction_loss_only, ignore_keys): gets the rows of an evaluation batch, which
        PPO may answer greedily before; what it notes of completions in `_logs` is this batch's alone meanwhile
    get_train_dataloader(): refuses too few rows for one step; here, in `__init__` and for its table TRL counts the
        completions of a generation by `args.generation_batch_size`, which is larger when oversampling
    get_batch_samples(): where a stream's own code may raise
    _tokenize_prompts(prompts): measures the longest prompt
    _tokenizer: the tokenizer, also where `processing_class` is a processor
    _last_loaded_step: of the weights that vLLM has; -1 lets TRL push them, as a server that was lost needs
    _is_vlm: whether rows may bring images
    _entropy_bonus_enabled: whether the loss has an entropy bonus, over which tokens must not be split
    log(logs, start_time): a full disk does not end training; clears `_metrics`; rank 0 writes completions
    _metrics: what the next log averages; swapped while nothing of a forward may be logged
    _logs: completions for their table; swapped in an evaluation of PPO's; its images are dropped where ranks differ
    log_multimodal: whether images are gathered for it; off where ranks differ
    _current_train_step_time: a rehearsed step leaves it as it was
    _last_world_entropy: a rehearsed step leaves it as it was
    _entropy_window_stats: a rehearsed step leaves it as it was
    _name: PPO's, for the model card
    _tag_names: PPO's, for the model card
    _paper: PPO's, for the model card
trl.trainer.reward_trainer:RewardTrainer
    __init__(model, args, data_collator, train_dataset, eval_dataset, processing_class, peft_config): checks the data
        before; installs packing and our collator after
    _prepare_dataset(dataset, processing_class, args, dataset_name): names bad pairs before; fits to length and
        counts shared tokens after. TRL calls it for training pairs first
    _set_signature_columns_if_needed(): lets the columns `shared_tokens` and `rule_gap` through to the collator
    _signature_columns: the columns that reach the collator
    compute_loss(model, inputs, return_outputs, num_items_in_batch)=: scores flat rows; TRL's own for padded batches
    _save(output_dir, state_dict): writes with the weights what the model was trained to read
    _save_checkpoint(model, trial): writes into another folder, which is renamed when complete
    get_train_dataloader(): under a token budget, plans rows over the sampler's pairs; refuses too few
    get_batch_samples(epoch_iterator, num_batches, device): ranks agree here on pairs and forwards of an optimizer step
    training_step(): timed as the phase `update`
    _load_optimizer_and_scheduler(checkpoint): called with the checkpoint to resume from, when its state is loaded;
        `num_tokens` goes on from there
    evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix): timed; averages all
    floating_point_ops(inputs): counts the tokens of flat rows
    _track_num_input_tokens(inputs): counts the tokens of flat rows
    log(logs, start_time): a full disk does not end training
    _metrics: what the next log averages
    _total_train_tokens: counts the tokens of flat rows; goes on when a run is resumed
trl.experimental.async_grpo:AsyncGRPOTrainer
    __init__(model, reward_funcs, args, train_dataset, processing_class, callbacks, optimizers, peft_config, tools,
        environment_factory, rollout_worker, weight_transfer): gives the model the attention `tree_fa3`, which ours
        replaces by that name
    compute_loss(model, inputs, return_outputs, num_items_in_batch): forwards a row with `tree_kv_index`,
        `tree_cu_seqlens_q` and `tree_cu_seqlens_k`; the output's `log_probs` at `token_index` are compared with
        `old_log_probs`
    _peak_flops_per_device: of the card; None where there is none
    _log_step_metrics(): called at the end of every optimizer step on all ranks; phases and rules get our names
    log(logs, start_time): a full disk does not end training; clears `_metrics`, which it reduces by the words of names
    _metrics: what the next log reduces
trl.trainer.base_trainer:_BaseTrainer
    create_model_card(model_name, dataset_name, tags): writes README.md; its sentence `This model is a fine-tuned
        version of ...` and its heading `### Framework versions` are found there
trl.trainer.callbacks
    SyncRefModelCallback.sync_target_model(model, target_model, alpha): moves only parameters of the reference model
trl.trainer.utils
    use_adapter(model, adapter_name): the policy without its adapter, or with the copy named "ref", as reference
    RepeatSampler.__init__(data_source, mini_repeat_count, batch_size, repeat_count, shuffle, seed)=: its generator,
        seeded once, draws one permutation of `num_samples` an epoch
    add_fused_lm_head(model, temperature, cast_lm_head_to_fp32, outputs): log-probabilities and entropies of a packed
        row without its logits; `shift_labels` at chosen positions
    _CHUNKED_LOGPROB_CHUNK_SIZE: width of that head's tiles; narrower on a processor
    _ChunkedLogProbFunction: that head's, whose `forward` `torch.compile` passes over
    FusedCausalLMOutput(log_probs, entropy): values are added to its fields
    split_pixel_values_by_grid(batch): the patches and grids of each row
    is_async_callable(): guards asynchronous reward functions as such
    disable_dropout_in_model(model): the value model, where the policy has none either
trl.trainer.reward_config
    RewardConfig.__post_init__(): checks our own fields after TRL's
trl.trainer.grpo_config
    GRPOConfig.__post_init__(): checks our own fields after TRL's
trl.models.utils
    prepare_deepspeed(model, accelerator): reference, reward and value models
    disable_gradient_checkpointing(model, gradient_checkpointing_kwargs): around the passes before an update, as in TRL
trl:ModelConfig
    __post_init__(): checks a reward model's settings after TRL's
trl:TrlParser
    __init__(dataclass_types): the dataclasses whose fields a recipe may set
    set_defaults_with_config(kwargs): drops a recipe's launch file; casts numbers of a recipe to text for text fields
    parse_args_and_config(args, return_remaining_strings, fail_with_unknown_args, separate_remaining_strings): strict
        parsing in the scripts
trl.generation.vllm_client:VLLMClient
    __init__(base_url, host, server_port, group_port, connection_timeout): our client serves several servers
    check_server(total_timeout, retry_interval): asks all servers
    get_world_size(): the workers of all servers
    _post(url): all that the client sends; prompts are divided, and each server joins the group at another rank
    generate(prompts, features, n, temperature, max_tokens, logprobs): completions that were asked for ahead are given
        where these prompts are asked for with this sampling; returns lists by prompt
    update_named_params(metadata, named_params): takes all weights, also where a server is lost meanwhile
    reset_prefix_cache(): after a push; of servers that are there
    init_communicator(device): joins servers again that were started again
    close_communicator(): before that
trl.generation.vllm_generation:VLLMGeneration
    _iter_named_params(): weights under vLLM's names; with adapters under ZeRO-3 ours, one layer at a time
    _fix_param_name_to_vllm(name, extra_prefixes): vLLM's name of a weight
    _dist: gathers parameters, and knows whether ZeRO-3 divides them
transformers:Trainer
    train(resume_from_checkpoint, trial): gets a complete checkpoint or none
    evaluate(): called for every evaluation; afterwards training's random numbers are restored
    _determine_best_metric(metrics, trial): what it returns decides on a save after an evaluation if only the best are
        saved, and nothing else; the save of a signal takes place, too
    training_step(model, inputs, num_items_in_batch): called once a row under a token budget, through TRL's, which
        passes everything on
    create_optimizer(model): PPO's critic has a separate learning rate
    create_scheduler(num_training_steps, optimizer): called before accelerate prepares; PPO's critic gets another
    _get_grad_norm(model, grad_norm): called at every optimizer step, after it under DeepSpeed; ends runs with NaN
    _init_training_state(max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial):
        given by place; returns epochs and micro-batches to leave out: of a stream, ours
    _run_epoch(train_dataloader, resume_from_checkpoint): given by name, once an epoch, or not at all when no
        step is left
    get_eval_dataloader(eval_dataset): keeps persistent workers, which draw a number where they begin
    _get_output_dir(trial): names another folder while a checkpoint is written
    _push_from_checkpoint(checkpoint_folder): called when a checkpoint is complete
    _load_from_checkpoint(resume_from_checkpoint, model): what it gives the model's `load_state_dict` is dropped
    _load_scaler(checkpoint): reads scaler.pt if it is there, also into an accelerator without a scaler
    _load_best_model(): the same; both files are read again by their own names, and PPO's critic with them
    _issue_warnings_after_load(load_result): a trained weight that is missing is an error of ours
    _save(output_dir, state_dict): writes PPO's critic with the weights
    save_model(output_dir): a full disk is kept until all processes have met
    _save_optimizer_and_scheduler(output_dir): a full disk is kept until all processes have met
    _save_scaler(output_dir): a full disk is kept until all processes have met
    _save_rng_state(output_dir): a full disk is kept until all processes have met
    create_model_card(model_name): a full disk is kept until all processes have met
    add_callback(callback): a ProgressLine replaces the one there
transformers
    PreTrainedModel.gradient_checkpointing_enable(gradient_checkpointing_kwargs): the one way by which trainers
        switch checkpointing on; roles are pinned in its kwargs
    PreTrainedModel.enable_input_require_grads(): adds its hooks to the embeddings, and names them
    PreTrainedModel._require_grads_hook: there while its hooks are; a second set is not added
    PreTrainedConfig._name_or_path: names the model in outputs, messages and recipes
    AttentionInterface.register(key, value): an implementation registered again under its own name, which
        flash-attention and continuous batching read
    AttentionMaskInterface.register(key, value): its masks; a packed row needs the window
    GenerationConfig.disable_compile: TRL's True keeps decoding from being compiled
    GenerationConfig.max_cache_len: the least length of a static cache
transformers:GenerationMixin
    init_continuous_batching(): `generate_batch` makes its manager by it
    generate(generation_config, custom_generate): calls our loop instead of `_sample`, with all that it has prepared
    _sample(input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs): samples where our loop
        does not; tests compare our loop's tokens and random numbers with it
    _pad_token_tensor: which it sets in the config: what follows after the end of a row
    _prefill(input_ids, generation_config, model_kwargs, is_first_iteration): reads the prompts, or what a cache lacks
        of them
    _update_model_kwargs_for_generation(outputs, model_kwargs): adds a token to mask and positions
    _optimize_model_for_decode(): how mixtures of experts are multiplied for a token on a card
    prepare_inputs_for_generation(input_ids, next_sequence_length): what a forward gets for a token
transformers.training_args
    TrainingArguments.to_dict(): what trackers get loses its secrets
transformers.trainer
    DEFAULT_PROGRESS_CALLBACK: a notebook's, which ProgressLine replaces as well
transformers.trainer_utils
    sort_checkpoints(output_dir, use_mtime): the order in which save_total_limit removes checkpoints
transformers.utils.hub
    cached_file(path_or_repo_id, filename): finds that file in a folder or on the hub; OSError where there is none
transformers.trainer_jit_checkpoint:CheckpointManager
    setup_signal_handler(): taken back where a signal ends the run our way
    _original_sigterm_handler: what was there before
transformers.modeling_flash_attention_utils
    lazy_import_flash_attention(implementation): its second result is flash-attention's varlen function
torch._library.custom_ops:CustomOpDef
    __init__(namespace, name, schema, fn): an operator of flash-attention's; keeps its function as `_init_fn`
transformers.utils.generic
    is_flash_attention_requested(requested_attention_implementation): flash-attention takes windows, no mask
transformers.generation.continuous_batching.utils
    attn_mask_is_needed(config): continuous batching tests attention implementations by name, which packing keeps
transformers.generation.continuous_batching.continuous_api:ContinuousBatchingManager
    add_requests(inputs): called by `generate_batch` with all rows; the names that it returns order the results
    add_request(input_ids, request_id): reads `num_return_sequences` of the manager at each request, and the forks of a
        request are named after it with `__child#0`, `__child#1`, ...
transformers.integrations.flash_attention
    flash_attention_forward(module, query, key, value, attention_mask, dropout, scaling, sliding_window): the
        arguments of every attention function; looks the name in the config up
transformers.integrations.liger
    apply_liger_kernel(model, kernel_config): Liger's kernels in the layers of an instance, before the self-check
transformers.models.qwen2_5_vl.modeling_qwen2_5_vl:Qwen2_5_VLModel
    get_rope_index(input_ids, mm_token_type_ids, image_grid_thw): positions of a row with images; the other Qwen
        families have the same
    forward(input_ids, position_ids, pixel_values, image_grid_thw): puts features where the placeholder token stands
transformers.integrations.hub_kernels
    use_kernel_func_from_hub_with_fallback(func_name, package): makes a model file's functions, which take what their
        kernels take, and in `is_new_implementation` keep whether there is one
transformers.models.qwen3_next.modeling_qwen3_next
    causal_conv1d_fn(hidden_states, weight): replaced in each model file of layers with state: begins with a prefix's
        last inputs; gets the keywords of the model's call
    torch_chunk_gated_delta_rule(query, key, value, g, beta, chunk_size, initial_state, output_final_state): replaced
        in each model file of delta nets: begins with a prefix's state
transformers.models.bamba.modeling_bamba
    mamba2_chunk_scan(hidden_states, dt, A, B, C, chunk_size, dt_bias, initial_states, dt_softplus, dt_limit,
        return_final_states): the same of Mamba-2
    mamba2_split_conv1d_scan_combined(zxbcdt): returns None where the two others serve
transformers.masking_utils
    find_packed_sequence_indices(position_ids): masks wait for its answer; forwards of ours need none
    sdpa_mask(local_size, use_vmap): arguments of every mask function: the window, and whether a model adds functions
        to the mask
accelerate
    DistributedDataParallelKwargs(gradient_as_bucket_view): the accelerator's `ddp_handler`: DDP's gradients live in
        its buckets
accelerate.data_loader
    DataLoaderShard.__init__(dataset, device, rng_types, synchronized_generator): a loader whose batches were planned
        for this rank already
    BatchSamplerShard.__init__(batch_sampler): keeps the batches of all ranks, from which an optimizer step is planned
accelerate.state
    GradientState._set_sync_gradients(sync_gradients): more rows of a micro-batch follow: neither DDP nor DeepSpeed
        takes this backward for the last one
accelerate.utils
    map_pytorch_optim_to_deepspeed(optimizer): the second engine's, in host memory
accelerate.utils.memory
    should_reduce_batch_size(exception): which errors are out of memory
    clear_device_cache(garbage_collection): gives back what a forward held
accelerate.commands.launch
    launch_command_parser(subparsers): `trl-ext grpo` reads its options
    launch_command(args): `trl-ext grpo` starts the processes with it
    _validate_launch_command(args): `--launcher ray` reads a launch file as accelerate does
accelerate.utils.launch
    prepare_deepspeed_cmd_env(args): variables for Ray's workers under DeepSpeed
    prepare_multi_gpu_env(args): variables for several workers of Ray
    prepare_simple_launcher_cmd_env(args): variables for one worker of Ray
deepspeed.ops.op_builder.builder
    OpBuilder.jit_load(verbose): DeepSpeed's compilation of a helper is announced
deepspeed.utils.groups
    _create_zero_param_parallel_group(group_size): the groups of hpZ are made once, not for each model that loads
    _get_zero_param_intra_parallel_group(): whether they are there
deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer
    _wait_for_offload_copies(): a rehearsal drops gradients that are on their way to host memory
    _release_preflattened_grad_buffers(): a rehearsal drops its gradients
    _offload_accumulated_param_ids: a rehearsal drops gradients in host memory
deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3
    _offload_boundary_param_ids: a rehearsal drops gradients in host memory
peft.tuners.tuners_utils
    check_target_module_exists(config, key): whether a user's config trains the score head
    BaseTunerLayer.set_adapter(adapter_names): the state that roles switch
    BaseTunerLayer._active_adapter: set by itself, as the setter also changes which weights are trained
    BaseTunerLayer._disable_adapters: set by itself, as the setter also changes which weights are trained
torch
    Tensor._version: counts writes, so that a trained weight that a checkpoint lacks is noticed
    _fused_sdp_choice(): which kernel `scaled_dot_product_attention` becomes; of C++
    nn.Module._buffers: a generation during training restores the buffers
    nn.Module._modules: added heads are taken out of a model, and put back at their place
    ops.aten._flash_attention_forward(): rows of different lengths with their log-sum-exp, to be merged
    ops.aten._flash_attention_backward(): gradients of merged rows
    ops.aten._scaled_dot_product_flash_attention_for_cpu(): the same on a processor
    ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(): the same on a processor
torch.utils.cpp_extension
    _get_build_directory(name, verbose): is a helper of DeepSpeed's built?
torch.utils.file_baton:FileBaton
    __init__(lock_file_path, wait_seconds): a helper's lock
    wait(): waits for it without end; ours does not
torch._inductor
    list_mode_options(mode): what `torch_compile_mode` may be
torch.distributed
    monitored_barrier(group, timeout, wait_all_ranks): names the processes that do not come; its message is read,
        and its processes other than 0 heed the group's timeout only
    new_group(ranks, timeout, backend): groups besides the one of training
    ProcessGroup.set_timeout(): `ddp_timeout` on CPUs, where transformers does not pass it on; of C++, so without
        names of parameters
    ProcessGroup._get_backend(): its options hold the timeout
    distributed_c10d._world: all groups, for their timeouts
    distributed_c10d._get_default_store(): passes completions to other processes while they train
torch._C._distributed_c10d
    Backend.Options._timeout: whether a group has PyTorch's own timeout
torch.distributed.run
    get_args_parser(): knows `signals_to_handle`, which `trl-ext grpo` sets: it passes SIGTERM and Ctrl-C on itself
"""
_ROW = re.compile(r"([\w.]+)(\(.*?\))?(\[.*?\])?(=)?: (.*)")


@dataclass(frozen=True, slots=True)
class Seam:
    """A name of another project that we use.

    Args:
        where: "module:name" or "module:Class.name".
        parameters: Parameters that we pass by name or rely on, in this order.
        keys: Keys of the dictionary that the method returns.
        why: How we use it.
        is_remade: True if our code computes the same value.
    """

    where: str
    parameters: tuple[str, ...]
    keys: tuple[str, ...]
    why: str
    is_remade: bool = False

    @property
    def package(self) -> str:
        """Name of the package on the index."""
        return self.where.partition(":")[0].partition(".")[0]

    @property
    def problem(self) -> str:
        """The difference between the installed version and this seam; "" if there is none."""
        try:
            found = resolve(self.where)
            names = list(inspect.signature(found).parameters) if self.parameters else []
        except (ImportError, AttributeError, OSError, RuntimeError, TypeError, ValueError) as error:
            return " ".join(f"is not there ({error})".split())
        if lost := [name for name in self.parameters if name not in names]:
            return f"lacks the parameters {', '.join(lost)}"
        if list(self.parameters) != sorted(self.parameters, key=names.index):
            return f"has its parameters in another order: {', '.join(names)}"
        code = str(inspect.unwrap(found).__code__.co_consts) if self.keys else ""
        lost = [key for key in self.keys if repr(key) not in code]
        return f"lacks the keys {', '.join(lost)}" if lost else ""


def _words(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\w+", text))


def _seams() -> Iterator[Seam]:
    owner = ""
    for line in re.sub(r"\n {8}", " ", _TABLE.strip()).splitlines():
        if not line.startswith(" "):
            owner = line + ("." if ":" in line else ":")
            continue
        match = _ROW.fullmatch(line.strip())
        assert match, line
        name, parameters, keys, sign, why = match.groups(default="")
        yield Seam(owner + name, _words(parameters), _words(keys), why, is_remade=bool(sign))


SEAMS = tuple(_seams())


def resolve(where: str) -> Any:
    """Return the object of "module:name" or "module:Class.name"; True for an attribute that methods of the class set.

    Raises:
        ImportError, AttributeError: There is none.
    """
    module, _, path = where.partition(":")
    found = import_module(module)
    for name in path.split("."):
        if inspect.isclass(found) and not hasattr(found, name) and name in set_in_methods(found):
            return True
        found = getattr(found, name)
    return found


@cache
def set_in_methods(owner: type) -> set[str]:
    """Return names of attributes that a class and its bases annotate, or that their methods set."""
    found = set()
    for base in owner.__mro__:
        found |= set(vars(base).get("__annotations__", {}))
        for method in filter(inspect.isfunction, vars(base).values()):
            code = inspect.unwrap(method).__code__
            found |= {step.argval for step in dis.get_instructions(code) if step.opname == "STORE_ATTR"}
    return found
