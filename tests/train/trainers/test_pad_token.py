"""A pad token that the model has no embedding of is one sentence when a trainer is made; with room for it, none."""

import pytest

from tests import grpo_trainers, ppo_trainers, reward_trainers, tiny
from tests.preferences import reward_model
from trl_ext.errors import ConfigError


def tokenizer(made=tiny.tokenizer):
    found = made()
    found.add_special_tokens({"pad_token": "[PAD]"})
    return found


def ppo(folder, monkeypatch, model):
    monkeypatch.setattr(tiny, "tokenizer", tokenizer)
    return ppo_trainers.trainer("head", folder, model=model(tiny.model("llama")), max_steps=1)


TRAINERS = {
    "grpo": lambda folder, _, model: grpo_trainers.trainer(
        folder, model=model(tiny.model("llama")), processing_class=tokenizer(), max_steps=1
    ),
    "reward": lambda folder, _, model: reward_trainers.trainer(
        folder,
        model=model(reward_model(folder / "base")),
        processing_class=tokenizer(reward_trainers.chat_tokenizer),
        max_steps=1,
    ),
    "ppo": ppo,
}
ROWS = len(tiny.tokenizer())


@pytest.mark.parametrize("made", TRAINERS.values(), ids=TRAINERS)
def test_a_pad_token_outside_the_embedding_is_refused_with_what_to_do(made, tmp_path, monkeypatch):
    words = (
        rf"^The pad token '\[PAD\]' has the id {ROWS}, and the model's embedding has {ROWS} rows: .*resize_token_emb"
    )
    with pytest.raises(ConfigError, match=words):
        made(tmp_path, monkeypatch, lambda model: model)


@pytest.mark.parametrize("made", TRAINERS.values(), ids=TRAINERS)
def test_with_a_row_for_it_the_model_trains_and_loads(made, tmp_path, monkeypatch):
    def resized(model):
        model.resize_token_embeddings(ROWS + 1)
        return model

    trainer = made(tmp_path, monkeypatch, resized)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    assert type(trainer.model).from_pretrained(tmp_path / "saved").config.pad_token_id == ROWS
