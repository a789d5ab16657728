"""`cache_implementation: static`: transformers compiles decoding as one graph, and again for few lengths alone.

transformers compiles on cards. The tests let it do so on a processor, by a backend that runs the captured graph as it
is: graphs and recompilations are the same as on a card, seconds are not.
"""

import random
from itertools import pairwise

import pytest
import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from torch._dynamo.utils import counters
from transformers import CompileConfig

import trl_ext
from tests import tiny
from tests.grpo_trainers import trainer
from tests.nightly import nightly
from trl_ext.compat.transformers import attention_function
from trl_ext.packing.attention import AttentionDispatch

LENGTHS = (5, 9, 3, 14, 8, 20)  # of the prompts, one a generation


def data(lengths):
    draw = random.Random(0)
    rows = [tiny.words(*(draw.randrange(3, tiny.VOCAB) for _ in range(length))) for length in lengths]
    return Dataset.from_dict({"prompt": rows})


def compiled(folder, lengths=LENGTHS, library=trl_ext, **changes):
    """The trainer, trained for a generation of each length; and the number of graphs that each generation compiled."""
    settings = dict(data=data(lengths), shuffle_dataset=False, max_steps=len(lengths), max_completion_length=6)
    subject = trainer(folder, library, rollout_func=None, cache_implementation="static", **settings | changes)
    anywhere = CompileConfig(backend="eager", mode=None)
    anywhere._compile_all_devices = True
    subject.generation_config.compile_config = anywhere
    torch._dynamo.reset()
    counters.clear()
    seen, generate = [0], subject._generate_single_turn

    def counted(*args, **kwargs):
        found = generate(*args, **kwargs)
        seen.append(counters["stats"]["unique_graphs"])
        return found

    subject._generate_single_turn = counted
    subject.train()
    return subject, [after - before for before, after in pairwise(seen)]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        nightly({"bf16": True, "gradient_checkpointing": True}),
        {"gradient_checkpointing": True, "peft_config": LoraConfig(target_modules="all-linear")},
        nightly({"model": "qwen3_moe"}),
        {"model": "longrope"},  # frequencies by the length of a sequence
        {"model": "lfm2"},  # layers with state
        nightly({"model": "qwen3_5"}),
        {"packing": False},
    ],
    ids=lambda changes: ",".join(changes if "model" not in changes else changes.values()) or "plain",
)
def test_six_generations_of_other_lengths_share_one_graph(changes, tmp_path):
    subject, graphs = compiled(tmp_path, **changes)
    is_packed = changes.get("packing", True)
    attention = attention_function(subject.model.config._attn_implementation)
    assert subject._packs == is_packed and (isinstance(attention, AttentionDispatch) or not is_packed)
    assert not counters["graph_break"], dict(counters["graph_break"])
    assert graphs == [1, 0, 0, 0, 0, 0]


def test_a_cache_grows_in_steps(tmp_path):
    _, graphs = compiled(tmp_path, lengths=(5, 300, 20, 270, 7, 400))
    assert not counters["graph_break"] and graphs == [1, 1, 0, 0, 0, 0]


def test_windows_compile_as_often_as_by_transformers_alone(tmp_path):
    """Their caches count tokens by a number, one of few that a graph is compiled for."""
    _, graphs = compiled(tmp_path, model="gemma3")
    assert not counters["graph_break"] and sum(graphs) <= 3 and not any(graphs[3:])


def test_trl_switches_compiling_off(tmp_path):
    """The day that this fails, `compiled_decoding` need not switch it on."""
    _, graphs = compiled(tmp_path, library=trl, lengths=LENGTHS[:2])
    assert not any(graphs)


def test_completions_are_those_of_the_eager_static_cache(tmp_path):
    found = []
    for library in (trl, trl_ext):
        subject, _ = compiled(tmp_path / library.__name__, library=library, lengths=LENGTHS[:2], learning_rate=0.0)
        found.append(list(subject._logs["completion"]))
    assert found[0] == found[1]


def test_embeddings_keep_their_hooks_over_generations(tmp_path):
    subject = trainer(tmp_path, rollout_func=None, gradient_checkpointing=True, max_steps=3, data=data((5, 6, 7, 8)))
    seen, generate = [], subject._generate_single_turn

    def counted(*args, **kwargs):
        seen.append(list(subject.model.get_input_embeddings()._forward_hooks))
        return generate(*args, **kwargs)

    subject._generate_single_turn = counted
    subject.train()
    assert seen == [seen[0]] * 3
