"""A language model over words of yours, small enough to train in seconds on a processor. Take it home: it needs
transformers and torch alone.

    import tiny

    tokenizer = tiny.tokenizer(["yes", "no"])
    model = tiny.model(tokenizer)
"""

import logging
import os
import random
import warnings

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # read when TRL is imported, so import this module first
warnings.filterwarnings("ignore", message="IProgress not found")  # tqdm's, at the imports below

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

# How a conversation is written, and how a turn is read. Models with tool calls come with both.
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ' ' }}"
    "{% for call in m.get('tool_calls') or [] %}<call> {{ call['function'] | tojson }} </call> {% endfor %}"
    "{{ m['content'] }}{{ ' <eos> ' if m['role'] == 'assistant' else ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "assistant",
    "fields": {
        "tool_calls": {
            "open": "<call>",
            "close_pattern": r"</call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<eos>\s*", "content": "text"},
    },
}
CHAT_WORDS = ["user", "assistant", "tool", "<call>", "</call>"]


def quiet():
    """Leave warnings and bars out of the outputs, and one thread to torch: a tiny model gains nothing by more."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)


def tokenizer(words, chat=False, punctuation=False):
    """A tokenizer with one token for each word; a word that it does not know becomes padding.

    Args:
        words: The words, without white space in them.
        chat: True adds the words of a conversation with tool calls, and the templates above.
        punctuation: True takes signs for words of their own, also where no space stands before them.
    """
    all_words = ["<pad>", "<eos>", *(CHAT_WORDS if chat else ()), *words]
    fast = Tokenizer(models.WordLevel({word: i for i, word in enumerate(all_words)}, unk_token="<pad>"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace() if punctuation else pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=fast, pad_token="<pad>", eos_token="<eos>", padding_side="left")
    if chat:
        made.chat_template, made.response_template = CHAT_TEMPLATE, RESPONSE_TEMPLATE
    return made


def model(tokenizer, kind=LlamaForCausalLM, seed=0, **config):
    """A Llama of two layers with random weights, the same ones each time.

    Args:
        tokenizer: Its vocabulary is the model's.
        kind: Class of the model, such as LlamaForSequenceClassification.
        seed: Of the weights.
        config: What is to differ from the sizes below, and what else LlamaConfig takes.
    """
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    heads = dict(num_attention_heads=4, num_key_value_heads=2)
    special = dict(pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id)
    torch.manual_seed(seed)
    settings = dict(vocab_size=len(tokenizer), initializer_range=0.1) | sizes | heads | special | config
    return kind(LlamaConfig(**settings))


def copy(model):
    """A model with the same weights, to be trained from there."""
    made = type(model)(model.config)
    made.load_state_dict(model.state_dict())
    return made


def teach(model, tokenizer, example, steps, batch_size, seed=0):
    """Let a model learn to write such texts; return it.

    Args:
        model, tokenizer: As made above.
        example: Function without arguments that returns a text, by `random` another one each time.
        steps: Optimizer steps.
        batch_size: Texts in each of them.
        seed: Of the texts.
    """
    random.seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        batch = tokenizer([example() for _ in range(batch_size)], return_tensors="pt", padding=True)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        model(**batch, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model
