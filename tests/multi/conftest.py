"""Tiny models on disk, for processes of their own, and the wheel."""

import subprocess
import sys

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForSequenceClassification, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.conftest import ROOT

HIDDEN_SIZE = 64


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A folder with a random Llama and a tokenizer that knows 196 words."""
    folder = tmp_path_factory.mktemp("tiny_model")
    words = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"w{i}" for i in range(196))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", unk_token="<unk>"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=HIDDEN_SIZE,
        # ZeRO-3 leaves matrices below 1e5 entries whole (stage3_param_persistence_threshold); these have 131072.
        intermediate_size=2048,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_reward_model(tiny_model, tmp_path_factory):
    """The same Llama with a random score head, and its tokenizer."""
    return with_score_head(tiny_model, tmp_path_factory.mktemp("tiny_reward_model"))


def with_score_head(policy, folder):
    """Save the policy with a random score head in place of its own, and its tokenizer; return the folder."""
    model = AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1)
    # Its own draw, whatever ran before: it decides how large gradients are.
    torch.nn.init.normal_(model.score.weight, std=0.1, generator=torch.Generator().manual_seed(1))
    model.save_pretrained(folder)
    PreTrainedTokenizerFast.from_pretrained(policy).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """Path of the wheel, built offline with hatchling from here."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    [path] = folder.glob("*.whl")
    return path
