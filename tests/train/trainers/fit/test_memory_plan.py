"""`memory` of a config: what the plan sets in the run, what it leaves alone, what it refuses before a model loads."""

import os
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import BitsAndBytesConfig, QuantoConfig

from tests import tiny
from tests.preferences import pairs, reward_model
from tests.reward_trainers import chat_tokenizer, weights
from trl_ext import GRPOConfig, GRPOTrainer, PPOConfig, PPOTrainer, RewardConfig, RewardTrainer
from trl_ext.doctor import Facts
from trl_ext.errors import ConfigError
from trl_ext.memory.cards import parse_gpus
from trl_ext.memory.formulas.estimate import estimate
from trl_ext.memory.job import Job
from trl_ext.memory.models.find import find_shape
from trl_ext.memory.planner.folder import write_plan
from trl_ext.memory.planner.planner import Plan
from trl_ext.memory.planner.run import Run
from trl_ext.scripts import grpo, training
from trl_ext.trainers.fit import plan as memory_plan

QUIET = dict(use_cpu=True, bf16=False, report_to="none", disable_tqdm=True, save_strategy="no")
PROMPTS = Dataset.from_list([{"prompt": tiny.words(5, 6, 7, 8)}, {"prompt": tiny.words(9)}] * 16)
LORA = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """A config with `memory` sets the allocator's variable for good; not for the other tests."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))


def constant(completions, **columns):
    return [float(len(completion)) for completion in completions]


def grpo_trainer(folder, model="llama", peft_config=None, **settings):
    args = GRPOConfig(str(folder), **QUIET | dict(max_completion_length=4, num_generations=4) | settings)
    model = tiny.model(model) if model in tiny.PACKABLE else model
    return GRPOTrainer(model, constant, args, PROMPTS, processing_class=tiny.tokenizer(), peft_config=peft_config)


def reward_trainer(folder, **settings):
    own = dict(learning_rate=1e-3, adam_epsilon=1e-3, max_steps=2, max_length=64) | settings
    args, model = RewardConfig(str(folder), **QUIET | own), reward_model(folder / "model", "llama")
    return RewardTrainer(model, args, train_dataset=pairs(16), processing_class=chat_tokenizer())


def only_config(folder):
    """A model's folder without weights: whatever loads it fails."""
    tiny.model("llama").config.save_pretrained(folder)
    return str(folder)


def written(folder, model, num_gpus=1, **settings):
    """A plan for one card, in a folder."""
    job = Job("grpo", **{"num_generations": 4, "global_batch": 8, "max_prompt_length": 8, **settings})
    return str(write_plan(Plan(estimate(job, find_shape(model), parse_gpus(f"{num_gpus}xA40"))), folder)[0].parent)


# What is set ------------------------------------------------------------------------------------------------------


def test_a_planned_run_trains_what_the_plain_one_trains(tmp_path):
    """Two optimizer steps of 8 pairs: in micro-batches of 2 with checkpointing, and as the plan splits them."""
    small = dict(per_device_train_batch_size=2, gradient_accumulation_steps=4, gradient_checkpointing=True)
    plain = reward_trainer(tmp_path / "plain", **small)
    planned = reward_trainer(tmp_path / "planned", memory="1x4090", global_batch=8)
    assert planned.args.per_device_train_batch_size == 8 and not planned.args.gradient_checkpointing
    before = weights(plain).clone()
    plain.train()
    planned.train()
    assert (weights(plain) - before).abs().max() > 1e-4
    assert (weights(planned) - weights(plain)).abs().max() < 2e-6


def test_a_generation_is_as_large_as_before(tmp_path):
    args = grpo_trainer(tmp_path, memory="1xA40-48GB", global_batch=16).args
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps == 16
    assert args.steps_per_generation == args.gradient_accumulation_steps and args.generation_batch_size == 16
    assert args.memory_plan.job.max_prompt_length == 4  # the longest of the rows


def test_a_prompt_longer_than_the_plans_is_told_and_counted(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(memory_plan.logger, "warning", told.append)
    args = grpo_trainer(tmp_path, memory="1xA40-48GB", global_batch=16, memory_prompt_length=3).args
    assert args.memory_plan.job.max_prompt_length == 4
    (sentence,) = [one for one in told if "memory_prompt_length" in one]
    words = "The longest prompt has 4 tokens, and memory_prompt_length is 3: memory is planned for 4."
    assert sentence.startswith(words)


@pytest.mark.parametrize("offload", ["none", "all"])
def test_a_run_that_fsdp_shards_is_planned_so(offload, tmp_path, monkeypatch):
    launched = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": str(offload == "all")}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    args = GRPOConfig(str(tmp_path), **QUIET)
    inputs = memory_plan.Inputs(tiny.model("llama"), tokenizer=tiny.tokenizer(), dataset=PROMPTS)
    job = memory_plan.describe_run("grpo", args, inputs).job
    assert (job.fsdp, job.zero_stage, job.offload) == (True, 3, offload)
    monkeypatch.setenv("FSDP_RESHARD_AFTER_FORWARD", "false")
    with pytest.raises(ConfigError, match="only version 2 that reshards is planned"):
        memory_plan.describe_run("grpo", args, inputs)


def test_nobody_is_warned_by_a_formula_of_another_family_unasked(monkeypatch):
    """Measured memory is held against formulas of the model's own family, unless `memory` asks for the nearest."""
    shape = find_shape({"model_type": "llama", "num_hidden_layers": 2})
    trainer = SimpleNamespace(args=SimpleNamespace(), memory_kind="grpo")
    monkeypatch.setattr(memory_plan, "inputs_of", lambda trainer: None)
    monkeypatch.setattr(memory_plan, "cards_here", lambda: parse_gpus("1xA40"))
    for stands_for, is_planned in [("", True), ("qwen3_5", False)]:
        run = Run(Job("grpo"), frozenset(), replace(shape, stands_for=stands_for), 1, 1)
        monkeypatch.setattr(memory_plan, "describe_run", lambda *_, run=run: run)
        assert (memory_plan.plan_of(trainer) is not None) is is_planned


def test_a_prompt_that_vllm_has_no_room_for_is_refused():
    args = SimpleNamespace(memory_prompt_length=None, process_index=0, use_vllm=True, max_completion_length=10)
    inputs = memory_plan.Inputs(None, tokenizer=tiny.tokenizer(), dataset=PROMPTS)
    args.vllm_max_model_length = 14
    assert memory_plan._prompt_tokens(args, inputs) == 4
    args.vllm_max_model_length = 13
    words = "has 4 tokens; with max_completion_length=10 that is more than vllm_max_model"
    with pytest.raises(ConfigError, match=words):
        memory_plan._prompt_tokens(args, inputs)


def test_a_loss_that_sees_the_micro_batch_keeps_it_and_what_was_given_stays(tmp_path):
    def planned(**settings):
        args = grpo_trainer(tmp_path, memory="1xA40-48GB", **settings).args
        return args, (args.per_device_train_batch_size, args.gradient_accumulation_steps)

    for own in ({"loss_type": "bnpo"}, {"entropy_coef": 0.01}, {"top_entropy_quantile": 0.5}):
        assert planned(gradient_accumulation_steps=4, **own)[1] == (8, 4), own  # TRL's default of the first
    given = dict(per_device_train_batch_size=4, gradient_checkpointing=True, gradient_accumulation_steps=2)
    args, batch = planned(**given)
    assert batch == (4, 2) and args.gradient_checkpointing and args.memory_plan.job.checkpoint_every == 1


def test_a_users_options_of_checkpointing_stay_in_a_planned_run(tmp_path):
    options = {"use_reentrant": False, "every_n_layers": 2}
    args = grpo_trainer(tmp_path, memory="1xA40-48GB", gradient_checkpointing_kwargs=dict(options)).args
    assert args.memory_plan.job.checkpoint_every == 2
    assert args.gradient_checkpointing_kwargs == options


@pytest.mark.parametrize("options", [{"keep_attention": False}, {"use_reentrant": True}])
def test_a_plan_keeps_no_attention_against_a_users_options(options, tmp_path):
    tiny.model("llama").save_pretrained(tmp_path / "model")
    plan = written(tmp_path / "plan", str(tmp_path / "model"), checkpoint_every=1, keep_attention=True)
    settings = dict(memory=plan, gradient_checkpointing=True)
    assert grpo_trainer(tmp_path, **settings).args.gradient_checkpointing_kwargs == {"keep_attention": True}
    args = grpo_trainer(tmp_path, **settings, gradient_checkpointing_kwargs=dict(options)).args
    assert args.gradient_checkpointing_kwargs == options


def test_frozen_weights_are_loaded_in_bfloat16(tmp_path):
    tiny.model("llama").save_pretrained(tmp_path / "model")
    settings = dict(memory="1xA40-48GB", global_batch=8)
    trainer = grpo_trainer(tmp_path, str(tmp_path / "model"), LORA, **settings)
    frozen = {p.dtype for p in trainer.model.parameters() if not p.requires_grad}
    assert frozen == {torch.bfloat16}
    full = grpo_trainer(tmp_path, str(tmp_path / "model"), **settings)
    assert {p.dtype for p in full.model.parameters()} == {torch.float32}  # the only master copy


BITS = {
    "lora": [None, {"load_in_8bit": True}, BitsAndBytesConfig(load_in_8bit=True), QuantoConfig(weights="int4")],
    "qlora": [{"load_in_4bit": True}, BitsAndBytesConfig(load_in_4bit=True)],
}


@pytest.mark.parametrize(("method", "quantized"), [(method, one) for method, all in BITS.items() for one in all])
def test_only_weights_loaded_in_4_bits_are_planned_in_4_bits(method, quantized, tmp_path):
    """Weights in 8 bits are planned as bf16, as by `trl-ext check`; they need less."""

    def planned(model, init_kwargs=None, **given):
        args = GRPOConfig(str(tmp_path), **QUIET, model_init_kwargs=init_kwargs)
        inputs = memory_plan.Inputs(model, LORA, tokenizer=tiny.tokenizer(), dataset=PROMPTS, **given)
        return memory_plan.describe_run("grpo", args, inputs).job.method

    name, loaded = only_config(tmp_path / "model"), tiny.model("llama")
    assert planned(name, quantization_config=quantized) == method
    assert planned(name, init_kwargs={"quantization_config": quantized}) == method
    assert planned(loaded, quantization_config=quantized) == "lora", "TRL ignores it for a model that is loaded"
    if quantized is not None:  # what transformers leaves at a model that it has quantized
        loaded.config.quantization_config, loaded.quantization_method = quantized, "bitsandbytes"
    assert planned(loaded) == method


def test_ppo_is_planned_before_its_critic(tmp_path):
    args = PPOConfig(str(tmp_path), **QUIET, max_completion_length=4, memory="1xA40-48GB", global_batch=8)
    tokenizer, model = tiny.tokenizer(), tiny.model("llama")
    trainer = PPOTrainer(args, tokenizer, model, train_dataset=PROMPTS, reward_funcs=constant)
    assert args.memory_plan.job.critic == "head" == trainer._critic.name
    assert args.batch_size == 8 and args.per_device_train_batch_size * args.gradient_accumulation_steps == 8


# What is refused --------------------------------------------------------------------------------------------------


BEFORE_ANYTHING_LOADS = [
    (dict(memory="2xA40-48GB"), "is for 2xA40-48GB, and 1 process was launched"),
    (dict(memory="1xA40-48GB", global_batch=6), "does not divide by num_generations 4"),
    (dict(memory="ppo-8b-4xa40-48gb"), "is for 4xA40-48GB|is for ppo"),
    (dict(memory="1xA40-48GB", memory_prompt_length=600), "more than the 512 positions"),
    (dict(memory="{plan}"), "planned with zero_stage=2, and this run has zero_stage=0"),
]
BAD_WORDS = [
    (dict(memory="4xA41"), "neither auto, nor cards"),
    (dict(memory="auto", global_batch=0), "global_batch=0 must be at least 1"),
]


def test_contradictions_and_bad_words_are_sentences_before_anything_loads(subtests, tmp_path):
    model = only_config(tmp_path / "model")
    plan = written(tmp_path / "plan", model, zero_stage=2)
    for settings, sentence in BEFORE_ANYTHING_LOADS:
        settings["memory"] = settings["memory"].replace("{plan}", plan)
        with subtests.test(sentence), pytest.raises(ConfigError, match=sentence):
            grpo_trainer(tmp_path, model, **settings)
    for settings, sentence in BAD_WORDS:
        with subtests.test(sentence), pytest.raises(ConfigError, match=sentence):
            GRPOConfig(str(tmp_path), **QUIET | settings)


def test_auto_without_a_card_asks_for_its_name(tmp_path, monkeypatch):
    look = import_module("trl_ext.doctor.look")  # the package's `look` is the function in it
    monkeypatch.setattr(look, "look_at_cards", lambda: Facts(gpus=()))
    with pytest.raises(ConfigError, match=r"there are none\. Name those that the run is for"):
        memory_plan.cards_here()


# Who gave what ----------------------------------------------------------------------------------------------------


def test_our_parser_knows_the_words_of_flags_and_recipe(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("gradient_checkpointing: true\nmemory: 1xA40-48GB\ndtype: float32\n")
    words = ["--config", str(recipe), "--output_dir", str(tmp_path), "--use_cpu", "true", "--bf16", "false"]
    parsed = grpo.make_parser().parse([*words, "--beta=0.0"])
    args, model_args = parsed[1], parsed[2]
    assert {"gradient_checkpointing", "beta", "dtype", "memory"} <= args.given and "max_steps" not in args.given
    assert training.model_init_kwargs(args, model_args)["dtype"] == "float32"
    args.given -= {"dtype"}
    assert "dtype" not in training.model_init_kwargs(args, model_args)
