"""The tiny model that vLLM serves and the trainer trains."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests import tiny


@pytest.fixture(scope="package")
def model(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("model"))


def saved(folder, **changes):
    """The folder, with a random model in it."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4) | changes
    special = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
    config = LlamaConfig(vocab_size=tiny.VOCAB, num_key_value_heads=2, initializer_range=0.1, **sizes, **special)
    LlamaForCausalLM(config).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder
