"""What docs/running/after.md shows merges a policy's adapter and a reward model's: the weights say what they said."""

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests import recipes, reward_trainers, tiny
from tests.documents import BLOCKS

IDS = torch.arange(3, 23)[None]
LORA = dict(r=4, lora_alpha=8, target_modules="all-linear")


def printed(name):
    [block] = [one for one in BLOCKS if one.page == "docs/running/after.md" and f"import {name}\n" in one.text]
    return block.text


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=IDS).logits


def test_a_policys_adapter_is_merged(tmp_path, monkeypatch):
    base = recipes.save(tmp_path / "base", tiny.model("llama", tie_word_embeddings=True))
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(**LORA, task_type="CAUSAL_LM"))
    torch.manual_seed(5)
    for parameter in adapted.parameters():
        if parameter.requires_grad:  # an adapter begins as zeros
            torch.nn.init.normal_(parameter, std=0.1)
    recipes.save(tmp_path / "out" / "grpo", adapted)
    monkeypatch.chdir(tmp_path)
    exec(printed("AutoPeftModelForCausalLM"), {})
    plain = AutoModelForCausalLM.from_pretrained(base)
    unmerged = logits(plain)
    wanted = logits(PeftModel.from_pretrained(plain, tmp_path / "out" / "grpo"))
    merged = AutoModelForCausalLM.from_pretrained("merged")
    torch.testing.assert_close(logits(merged), wanted, atol=1e-5, rtol=0)
    assert (wanted - unmerged).abs().max() > 0.01 and merged.config.tie_word_embeddings
    assert AutoTokenizer.from_pretrained("merged")("w7 w8").input_ids == [7, 8]


def test_a_reward_models_adapter_is_merged_with_its_head(tmp_path, monkeypatch):
    tiny.model("llama").save_pretrained(tmp_path / "base")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=1)
    trainer = reward_trainers.trainer(
        tmp_path / "out" / "reward", model=model, max_steps=1, learning_rate=0.1,
        peft_config=LoraConfig(**LORA, task_type="SEQ_CLS"),
    )  # fmt: skip
    trainer.train()
    trainer.save_model()
    monkeypatch.chdir(tmp_path)
    exec(printed("AutoPeftModelForSequenceClassification"), {})
    merged = AutoModelForSequenceClassification.from_pretrained("scorer")
    torch.testing.assert_close(logits(merged), logits(trainer.model), atol=1e-5, rtol=0)
    assert merged.num_labels == 1 and merged.config.pad_token_id == trainer.processing_class.pad_token_id
    assert (tmp_path / "scorer" / "reward_input.json").read_text()
