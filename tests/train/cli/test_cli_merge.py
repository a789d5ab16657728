"""`trl-ext merge`: the merged weights say what the adapter said, tied heads stay one, and half a run is a sentence."""

import json
import shutil

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests import ppo_trainers, reward_trainers, tiny
from tests.recipes import stopped
from trl_ext.cli.main import main
from trl_ext.trainers.checkpoints.manifest import Manifest, files_in, measured

IDS = torch.arange(3, 23)[None]
LORA = dict(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Two base models with tokenizers: one whose head is its embedding, one whose head is its own."""
    folder = tmp_path_factory.mktemp("bases")
    for name, tied in (("tied", True), ("untied", False)):
        model = tiny.model("llama", tie_word_embeddings=tied)
        model.generation_config.max_length = 77
        model.save_pretrained(folder / name)
        tiny.tokenizer().save_pretrained(folder / name)
    return folder


def drawn(model, seed: int = 5):
    """The model, with every trained weight drawn at random: an adapter begins as zeros."""
    torch.manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def saved_run(folder, base, **changes):
    """An output_dir with a random adapter and the tokenizer; its logits."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = drawn(get_peft_model(model, LoraConfig(**{**LORA, **changes}))).eval()
    model.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return logits(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder))


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=IDS).logits


def names_in(folder):
    with safe_open(folder / "model.safetensors", "pt") as file:
        return list(file.keys())


@pytest.mark.parametrize(
    ("base", "changes", "stays_tied"),
    [
        ("tied", {}, True),
        ("untied", {}, False),
        # Tied weights are divided where the adapter changes one of them.
        ("tied", dict(target_modules=["q_proj", "embed_tokens"]), False),
        ("tied", dict(target_modules=["q_proj", "lm_head"]), False),
        ("tied", dict(target_modules=["q_proj"], modules_to_save=["lm_head"]), False),
        ("tied", dict(target_modules=["q_proj"], modules_to_save=["embed_tokens"], ensure_weight_tying=True), True),
        ("tied", dict(target_modules=["q_proj"], trainable_token_indices=[5, 6]), True),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else str(value),
)
def test_merged_weights_say_what_the_adapter_said(base, changes, stays_tied, bases, tmp_path, capsys):
    wanted = saved_run(tmp_path, bases / base, **changes)
    assert merge(tmp_path) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), wanted, atol=1e-5, rtol=0)
    plain = logits(AutoModelForCausalLM.from_pretrained(bases / base))
    assert (wanted - plain).abs().max() > 0.01  # the adapter says something
    assert merged.config.tie_word_embeddings is stays_tied
    assert ("lm_head.weight" in names_in(tmp_path / "merged")) is not stays_tied
    assert merged.generation_config.max_length == 77
    assert AutoTokenizer.from_pretrained(tmp_path / "merged")("w7 w8").input_ids == [7, 8]
    assert f"{tmp_path / 'merged'}\n" in capsys.readouterr().out


def test_dtype_is_of_the_weights(bases, tmp_path):
    saved_run(tmp_path, bases / "tied")
    assert merge(tmp_path, "--dtype", "bfloat16", "--output", tmp_path / "new" / "half") == 0
    with safe_open(tmp_path / "new" / "half" / "model.safetensors", "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}


def test_a_reward_model_keeps_head_and_record(tmp_path):
    base = tmp_path / "base"
    tiny.model("llama").save_pretrained(base)
    trainer = reward_trainers.trainer(
        tmp_path / "out", model=AutoModelForSequenceClassification.from_pretrained(base, num_labels=1), max_steps=1,
        learning_rate=0.1, peft_config=LoraConfig(**{**LORA, "task_type": "SEQ_CLS"}),
    )  # fmt: skip
    trainer.train()
    trainer.save_model()
    assert merge(tmp_path / "out") == 0
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out" / "merged")
    with torch.no_grad():
        wanted = trainer.model.eval()(input_ids=IDS).logits
    torch.testing.assert_close(logits(merged), wanted, atol=1e-5, rtol=0)
    assert merged.num_labels == 1 and merged.config.pad_token_id == 0
    records = [(tmp_path / "out" / name / "reward_input.json").read_text() for name in ("", "merged")]
    assert records[0] == records[1]


def test_a_ppo_runs_critic_is_left_out_and_said_where_there_is_one(tmp_path, bases, capsys):
    lora = dict(advantage_estimator="reinforce_pp", peft_config=LoraConfig(**ppo_trainers.LORA))
    for critic, own in (("none", lora), ("adapter", {})):
        model, out = AutoModelForCausalLM.from_pretrained(bases / "tied"), tmp_path / critic
        trainer = ppo_trainers.trainer(critic, out, model=model, max_steps=1, learning_rate=0.1, **own)
        trainer.train()
        trainer.save_model()
        assert merge(out) == 0
        assert ("The critic stays in" in capsys.readouterr().out) == (critic == "adapter")
    with torch.no_grad():
        wanted = trainer.model.eval()(input_ids=IDS).logits
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(out / "merged")), wanted, atol=1e-5, rtol=0)
    assert not any("critic" in name or "value" in name for name in names_in(out / "merged"))


def merge(*argv):
    return main(["merge", *map(str, argv)])


def test_what_cannot_be_merged_is_one_sentence(bases, tmp_path, capsys):
    assert "There is no folder" in stopped(capsys, merge, tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "holds neither a model nor a whole checkpoint" in stopped(capsys, merge, tmp_path / "empty")
    assert "holds whole weights and no adapter" in stopped(capsys, merge, bases / "tied")
    run = tmp_path / "run"
    saved_run(run, bases / "tied")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter").write_text("mine")
    assert "is not empty" in stopped(capsys, merge, run, "--output", tmp_path / "full")
    assert "is a file" in stopped(capsys, merge, run, "--output", tmp_path / "full" / "letter")


def shorten(path):
    path.write_bytes(path.read_bytes()[:-9])


def edit(run, **changes):
    path = run / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def broken_record(run):
    for name in ("recipe.yaml", "versions.json"):
        (run / name).write_text("a: [1")


DAMAGED = [
    ("holds no weights (adapter_model.safetensors)", lambda run: (run / "adapter_model.safetensors").unlink()),
    ("was not written to its end", lambda run: shorten(run / "adapter_model.safetensors")),
    ("adapter_config.json cannot be read", lambda run: (run / "adapter_config.json").write_text('{"r": ')),
    ("The base model of", lambda run: edit(run, base_model_name_or_path="/gone")),
    ("does not name its base model", lambda run: edit(run, base_model_name_or_path=None)),
    ("recipe.yaml is damaged", broken_record),
    ("does not fit the model", lambda run: edit(run, r=3)),
    ("does not fit the model", lambda run: edit(run, target_modules=["q_proj", "lm_head"])),
    ("cannot be loaded", lambda run: (run / "tokenizer.json").write_text("{")),
]


def test_half_a_run_is_one_sentence(subtests, bases, tmp_path, capsys):
    saved_run(tmp_path / "whole", bases / "tied")
    for number, (sentence, damage) in enumerate(DAMAGED):
        run = shutil.copytree(tmp_path / "whole", tmp_path / f"run{number}")
        damage(run)
        with subtests.test(sentence, number=number):
            assert sentence in stopped(capsys, merge, run)
            assert not (run / "merged").exists()


def test_an_output_dir_without_final_model_stands_for_its_newest_whole_checkpoint(bases, tmp_path, capsys):
    for step in (1, 2, 3):
        folder = tmp_path / f"checkpoint-{step}"
        saved_run(folder, bases / "tied")
        Manifest(step, {name: measured(folder / name) for name in files_in(folder)}, run={}).write(folder)
    shorten(tmp_path / "checkpoint-3" / "adapter_model.safetensors")
    assert merge(tmp_path) == 0
    assert (tmp_path / "merged-checkpoint-2" / "model.safetensors").is_file()
    capsys.readouterr()
    assert "is not complete" in stopped(capsys, merge, tmp_path / "checkpoint-3")
    shutil.move(tmp_path / "checkpoint-1", tmp_path / "_unfinished" / "checkpoint-1")
    assert "was not written to its end" in stopped(capsys, merge, tmp_path / "_unfinished" / "checkpoint-1")
