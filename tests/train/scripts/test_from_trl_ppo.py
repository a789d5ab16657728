"""A script in the shape of TRL's own `examples/scripts/ppo/ppo.py`, call by call, after its import has changed."""

import torch
from accelerate import PartialState
from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    HfArgumentParser,
)
from trl import ModelConfig, ScriptArguments, get_peft_config, get_quantization_config

from tests import recipes, tiny
from tests.ppo_trainers import classifier
from trl_ext import PPOConfig, PPOTrainer
from trl_ext.trainers.forward.reward_input import RewardEncoder

EVAL_ROWS = 4
# Rows of the embedding that no word has, as in Pythia: the pad token that the script adds takes one.
NUM_TOKENS = tiny.VOCAB + 9


def script(*argv):
    """TRL's steps in their order."""
    parser = HfArgumentParser((ScriptArguments, PPOConfig, ModelConfig))
    script_args, args, model_args = parser.parse_args_into_dataclasses(list(argv))
    assert get_quantization_config(model_args) is None
    options = dict(revision=model_args.model_revision, attn_implementation=model_args.attn_implementation)
    options["dtype"] = getattr(torch, model_args.dtype)

    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path, padding_side="left")
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    value_model, reward_model = (
        AutoModelForSequenceClassification.from_pretrained(args.reward_model_path, num_labels=1, **options)
        for _ in range(2)
    )
    policy = AutoModelForCausalLM.from_pretrained(args.sft_model_path, **options)
    peft_config = get_peft_config(model_args)
    reference = None if peft_config else AutoModelForCausalLM.from_pretrained(args.sft_model_path, **options)

    rows = load_dataset(
        script_args.dataset_name, name=script_args.dataset_config, split=script_args.dataset_train_split
    )

    def tokenized(part):
        tokenize = lambda row: {"input_ids": tokenizer(row["prompt"], padding=False)["input_ids"]}  # noqa: E731
        return part.map(tokenize, batched=True, remove_columns=rows.column_names, num_proc=args.dataset_num_proc)

    with PartialState().local_main_process_first():
        train, held_out = (
            tokenized(rows.select(range(*ends)))
            for ends in ((len(rows) - EVAL_ROWS,), (len(rows) - EVAL_ROWS, len(rows)))
        )
    trainer = PPOTrainer(
        args=args,
        processing_class=tokenizer,
        model=policy,
        ref_model=reference,
        reward_model=reward_model,
        value_model=value_model,
        train_dataset=train,
        eval_dataset=held_out,
        peft_config=peft_config,
    )
    trainer.train()
    trainer.save_model(args.output_dir)
    return trainer


def test_trls_script_trains_and_saves(tmp_path, monkeypatch):
    asked = []
    plain = RewardEncoder.__call__
    monkeypatch.setattr(RewardEncoder, "__call__", lambda *both: asked.extend(plain(*both)) or plain(*both))
    model = str(recipes.save(tmp_path / "sft", tiny.model("llama", vocab_size=NUM_TOKENS)))
    reward = str(recipes.save(tmp_path / "reward", classifier(vocab_size=NUM_TOKENS)))
    rows = [{"prompt": tiny.words(*range(3, 5 + i % 4))} for i in range(12)]
    recipes.write_rows(tmp_path / "data" / "train.jsonl", rows)
    trainer = script(
        *("--dataset_name", str(tmp_path / "data"), "--dataset_train_split", "train"),
        *("--output_dir", str(tmp_path / "out"), "--model_name_or_path", model),
        *("--sft_model_path", model, "--reward_model_path", reward, "--missing_eos_penalty", "1.0"),
        *("--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "1", "--total_episodes", "8"),
        *("--num_ppo_epochs", "1", "--num_mini_batches", "1", "--response_length", "6", "--use_cpu", "True"),
        *("--bf16", "False", "--report_to", "none", "--per_device_eval_batch_size", "4"),
    )
    assert trainer.state.global_step == 2
    assert (tmp_path / "out" / "critic").is_dir() and (tmp_path / "out" / "model.safetensors").is_file()
    assert len(asked) == 8 and {ids[-1] for ids in asked} == {2}, "the reward model reads EOS after every answer"
