"""`trl-ext merge`: the merged weights say what the adapter said, tied heads stay one, and half a run is a sentence."""

import json
import shutil

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests import ppo_trainers, reward_trainers, tiny
from trl_ext.cli.main import main

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


@pytest.mark.parametrize("base", ["tied", "untied"])
def test_merged_weights_say_what_the_adapter_said(base, bases, tmp_path, capsys):
    wanted = saved_run(tmp_path, bases / base)
    assert main(["merge", str(tmp_path)]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), wanted, atol=1e-5, rtol=0)
    plain = logits(AutoModelForCausalLM.from_pretrained(bases / base))
    assert (wanted - plain).abs().max() > 0.01  # the adapter says something
    assert merged.config.tie_word_embeddings is (base == "tied")
    heads = [name for name in names_in(tmp_path / "merged") if "lm_head" in name or "embed_tokens" in name]
    assert len(heads) == (1 if base == "tied" else 2)
    assert merged.generation_config.max_length == 77
    assert AutoTokenizer.from_pretrained(tmp_path / "merged")("w7 w8").input_ids == [7, 8]
    assert f"{tmp_path / 'merged'}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "stays_tied"),
    [
        (dict(target_modules=["q_proj", "embed_tokens"]), False),
        (dict(target_modules=["q_proj", "lm_head"]), False),
        (dict(target_modules=["q_proj"], modules_to_save=["lm_head"]), False),
        (dict(target_modules=["q_proj"], modules_to_save=["embed_tokens"], ensure_weight_tying=True), True),
        (dict(target_modules=["q_proj"], trainable_token_indices=[5, 6]), True),
    ],
    ids=lambda value: value if isinstance(value, bool) else "-".join(value),
)
def test_tied_weights_are_divided_where_the_adapter_changes_one_of_them(changes, stays_tied, bases, tmp_path):
    wanted = saved_run(tmp_path, bases / "tied", **changes)
    assert main(["merge", str(tmp_path)]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), wanted, atol=1e-5, rtol=0)
    assert merged.config.tie_word_embeddings is stays_tied
    assert ("lm_head.weight" in names_in(tmp_path / "merged")) is not stays_tied


def test_dtype_is_of_the_weights(bases, tmp_path):
    saved_run(tmp_path, bases / "tied")
    assert main(["merge", str(tmp_path), "--dtype", "bfloat16", "--output", str(tmp_path / "new" / "half")]) == 0
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
    assert main(["merge", str(tmp_path / "out")]) == 0
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out" / "merged")
    with torch.no_grad():
        wanted = trainer.model.eval()(input_ids=IDS).logits
    torch.testing.assert_close(logits(merged), wanted, atol=1e-5, rtol=0)
    assert merged.num_labels == 1 and merged.config.pad_token_id == 0
    records = [(tmp_path / "out" / name / "reward_input.json").read_text() for name in ("", "merged")]
    assert records[0] == records[1]


def test_a_ppo_runs_critic_is_left_out_and_said(tmp_path, bases, capsys):
    model = AutoModelForCausalLM.from_pretrained(bases / "tied")
    settings = dict(max_steps=1, learning_rate=0.1, num_ppo_epochs=1)
    trainer = ppo_trainers.trainer("adapter", tmp_path / "out", model=model, **settings)
    trainer.train()
    trainer.save_model()
    assert main(["merge", str(tmp_path / "out")]) == 0
    assert "The critic stays in" in capsys.readouterr().out
    folder = tmp_path / "out" / "merged"
    with torch.no_grad():
        wanted = trainer.model.eval()(input_ids=IDS).logits
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(folder)), wanted, atol=1e-5, rtol=0)
    assert not any("critic" in name or "value" in name for name in names_in(folder))


def test_nothing_is_said_of_a_critic_that_is_not_there(tmp_path, bases, capsys):
    model = AutoModelForCausalLM.from_pretrained(bases / "tied")
    settings = dict(advantage_estimator="reinforce_pp", peft_config=LoraConfig(**ppo_trainers.LORA), max_steps=1)
    trainer = ppo_trainers.trainer("none", tmp_path / "out", model=model, **settings)
    trainer.train()
    trainer.save_model()
    assert main(["merge", str(tmp_path / "out")]) == 0
    assert "critic" not in capsys.readouterr().out


def stopped(capsys, *argv):
    with pytest.raises(SystemExit) as stop:
        main(["merge", *map(str, argv)])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error and error.count("error: ") == 1
    return error


def test_what_cannot_be_merged_is_one_sentence(bases, tmp_path, capsys):
    assert "There is no folder" in stopped(capsys, tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "holds neither a model nor a whole checkpoint" in stopped(capsys, tmp_path / "empty")
    assert "holds whole weights and no adapter" in stopped(capsys, bases / "tied")
    run = tmp_path / "run"
    saved_run(run, bases / "tied")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter").write_text("mine")
    assert "is not empty" in stopped(capsys, run, "--output", tmp_path / "full")
    assert "is a file" in stopped(capsys, run, "--output", tmp_path / "full" / "letter")


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda run: (run / "adapter_model.safetensors").unlink(), "holds no weights (adapter_model.safetensors)"),
        (lambda run: shorten(run / "adapter_model.safetensors"), "was not written to its end"),
        (lambda run: (run / "adapter_config.json").write_text('{"r": '), "adapter_config.json cannot be read"),
        (lambda run: edit(run, base_model_name_or_path="/gone"), "The base model of"),
        (lambda run: edit(run, base_model_name_or_path=None), "does not name its base model"),
        (
            lambda run: [(run / name).write_text("a: [1") for name in ("recipe.yaml", "versions.json")],
            "recipe.yaml is damaged",
        ),
        (lambda run: edit(run, r=3), "does not fit the model"),
        (lambda run: edit(run, target_modules=["q_proj", "lm_head"]), "does not fit the model"),
        (lambda run: (run / "tokenizer.json").write_text("{"), "cannot be loaded"),
    ],
    ids=[
        *("no weights", "cut weights", "cut config", "base gone", "no base", "broken recipe", "another rank"),
        *("another layer", "broken tokenizer"),
    ],
)
def test_half_a_run_is_one_sentence(damage, sentence, bases, tmp_path, capsys):
    saved_run(tmp_path, bases / "tied")
    damage(tmp_path)
    assert sentence in stopped(capsys, tmp_path)
    assert not (tmp_path / "merged").exists()


def broken_record(run):
    for name in ("recipe.yaml", "versions.json"):
        (run / name).write_text("rules: [")


def shorten(path):
    path.write_bytes(path.read_bytes()[:-9])


def edit(run, **changes):
    path = run / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_an_output_dir_without_final_model_stands_for_its_newest_whole_checkpoint(bases, tmp_path, capsys):
    from trl_ext.trainers.checkpoints.manifest import Manifest, files_in, measured

    for step in (1, 2, 3):
        folder = tmp_path / f"checkpoint-{step}"
        saved_run(folder, bases / "tied")
        Manifest(step, {name: measured(folder / name) for name in files_in(folder)}, run={}).write(folder)
    shorten(tmp_path / "checkpoint-3" / "adapter_model.safetensors")
    assert main(["merge", str(tmp_path)]) == 0
    assert (tmp_path / "merged-checkpoint-2" / "model.safetensors").is_file()
    capsys.readouterr()
    assert "is not whole" in stopped(capsys, tmp_path / "checkpoint-3")
    shutil.move(tmp_path / "checkpoint-1", tmp_path / "_unfinished" / "checkpoint-1")
    assert "was not written to its end" in stopped(capsys, tmp_path / "_unfinished" / "checkpoint-1")
