"""Tree rows of TRL's AsyncGRPOTrainer through our attention: the numbers of each sample alone, on a processor."""

import copy

import pytest
import torch
from transformers import LlamaConfig
from trl.experimental.async_grpo import packing as trls

from tests import tiny
from tests.nightly import daily
from trl_ext.errors import ConfigError, PackingError
from trl_ext.packing import tree
from trl_ext.packing.kernels import merging_pays

torch.set_num_threads(1)
DRAWS = 20
LOGP_TOLERANCE, GRADIENT_TOLERANCE = 1e-6, 1e-5
FAMILIES = "llama", "mistral_window", "gemma3", "qwen3_moe", "phimoe_window", "deepseek_v3"
FORKING = 3  # of so few tokens are completions, so that they fork late


def samples_of(seed: int) -> list[dict]:
    """Eight samples: a common beginning, two prompts, and four completions of each, as TRL's queue gives them."""
    draw = torch.Generator().manual_seed(seed)

    def tokens(least, most, vocabulary):
        return torch.randint(3, vocabulary, (int(torch.randint(least, most, (), generator=draw)),), generator=draw)

    system, samples = tokens(1, 12, tiny.VOCAB), []
    for group in range(2):
        prompt = torch.cat([system, tokens(2, 24, tiny.VOCAB)])
        for _ in range(4):
            ids = torch.cat([prompt, answer := tokens(1, 15, 3 + FORKING)])
            mask = torch.cat([torch.zeros(len(prompt)), torch.ones(len(answer))]).long()
            samples.append(
                dict(input_ids=ids, completion_mask=mask, old_log_probs=torch.zeros(len(ids)), advantage=1.0)
                | dict(group_id=group)
            )
    return samples


def row_of(samples) -> dict[str, torch.Tensor]:
    row = trls.TreeRow()
    for sample in samples:
        row.add(sample)
    return row.pack()


def tree_log_probs(model, packed) -> torch.Tensor:
    """[M] of the trained tokens, forwarded as TRL's trainer does."""
    longest = dict(zip(("tree_max_seqlen_q", "tree_max_seqlen_k"), packed["tree_max_seqlens"].tolist(), strict=True))
    parts = {name: packed[name] for name in ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")}
    given = dict(input_ids=packed["input_ids"][None], position_ids=packed["position_ids"][None])
    logits = model(**given, **parts, **longest, use_cache=False).logits[0]
    at = packed["token_index"]
    return logits[at].float().log_softmax(-1).gather(1, packed["shift_labels"][at][:, None])[:, 0]


def alone_log_probs(model, samples) -> torch.Tensor:
    """The same, with each sample in a separate row."""
    found = []
    for sample in samples:
        logits = model(sample["input_ids"][None], use_cache=False).logits[0].float()
        n = int(sample["completion_mask"].sum())
        found.append(logits[-n - 1 : -1].log_softmax(-1).gather(1, sample["input_ids"][-n:, None])[:, 0])
    return torch.cat(found)


def in_trees(model):
    """A copy of the model that attends to tree rows."""
    tree.register_tree_attention()
    other = copy.deepcopy(model)
    other.set_attn_implementation(tree.TREE_ATTENTION)
    return other


def results(model, log_probs, weights):
    """Log-probabilities, and the gradients of their weighted mean."""
    model.zero_grad()
    found = log_probs(model)
    (found * weights).mean().backward()
    return found.detach(), torch.cat([weight.grad.float().flatten() for weight in model.parameters()])


def both(model, trees, seed):
    samples = samples_of(seed)
    packed = row_of(samples)
    weights = torch.randn(len(packed["token_index"]), generator=torch.Generator().manual_seed(seed))
    ours = results(trees, lambda model: tree_log_probs(model, packed), weights)
    return ours, results(model, lambda model: alone_log_probs(model, samples), weights)


@pytest.mark.parametrize("family", daily([*FAMILIES], "llama", "mistral_window"))
def test_trees_give_the_numbers_of_rows_alone_in_float32(family):
    model = tiny.model(family).eval()
    trees = in_trees(model)
    for seed in range(DRAWS):
        (logps, gradient), (true_logps, true_gradient) = both(model, trees, seed)
        assert (logps - true_logps).abs().max() <= LOGP_TOLERANCE
        assert (gradient - true_gradient).abs().max() <= GRADIENT_TOLERANCE


@pytest.mark.parametrize("family", daily(["llama", "mistral_window"], "llama"))
def test_trees_are_as_near_to_the_float32_truth_as_rows_alone_in_bf16(family):
    half = tiny.model(family).eval().bfloat16()
    truth, trees = copy.deepcopy(half).float(), in_trees(half)
    errors = torch.zeros(2, 2)  # trees and rows alone, log-probabilities and gradients
    for seed in range(DRAWS):
        ours = both(half, trees, seed)
        samples = samples_of(seed)
        weights = torch.randn(len(ours[0][0]), generator=torch.Generator().manual_seed(seed))
        true = results(truth, lambda model, samples=samples: alone_log_probs(model, samples), weights)
        for which, found in enumerate(ours):
            errors[which] += torch.stack([(a - b).norm() / b.norm() for a, b in zip(found, true, strict=True)])
    assert (errors[0] <= 1.1 * errors[1]).all(), errors / DRAWS


def test_long_prompts_keep_their_keys_once():
    model = tiny.model("llama").eval()
    trees = in_trees(model)
    prompt = torch.arange(3, 103)
    samples = []
    for number in range(6):
        ids = torch.cat([prompt, torch.tensor([number + 3, 9, number + 9])])
        mask = (torch.arange(len(ids)) >= len(prompt)).long()
        samples.append(dict(input_ids=ids, completion_mask=mask, old_log_probs=ids.float(), advantage=1.0, group_id=0))
    packed = row_of(samples)
    table = tree.table_of_tree(*(packed[f"tree_{name}"] for name in ("kv_index", "cu_seqlens_q", "cu_seqlens_k")))
    assert merging_pays(len(packed["input_ids"]), table.num_keys, table.longest, None)
    (logps, gradient), (true_logps, true_gradient) = (
        results(one, lambda model, f=f: f(model), torch.ones(18))
        for one, f in (
            (trees, lambda model: tree_log_probs(model, packed)),
            (model, lambda model: alone_log_probs(model, samples)),
        )
    )
    assert (logps - true_logps).abs().max() <= LOGP_TOLERANCE
    assert (gradient - true_gradient).abs().max() <= GRADIENT_TOLERANCE


def test_checkpointed_layers_attend_within_the_same_tree():
    model = tiny.model("llama").train()
    trees = in_trees(model)
    trees.gradient_checkpointing_enable()
    (logps, gradient), (true_logps, true_gradient) = both(model, trees, 0)
    assert (logps - true_logps).abs().max() <= LOGP_TOLERANCE
    assert (gradient - true_gradient).abs().max() <= GRADIENT_TOLERANCE


# Rows of another form ----------------------------------------------------------------------------------------------


def test_a_call_without_a_tree_is_refused():
    with pytest.raises(ConfigError, match=r"^LlamaAttention was called without the tree of its row"):
        in_trees(tiny.model("llama"))(torch.tensor([[3, 4]]))


@pytest.mark.parametrize(
    ("index", "cu_q", "cu_k"),
    [
        ([0, 1, 0, 2], [0, 2, 3], [0, 2, 4]),  # a part of a segment
        ([1, 0, 0, 1, 2], [0, 2, 3], [0, 2, 5]),  # a segment backwards
        ([2, 0, 1, 2], [0, 1, 3], [0, 2, 4]),  # a path that begins with a later segment
        ([0, 1], [0, 2, 3], [0, 2, 2]),  # a segment that does not see itself
        ([-1, 0, 0, 1], [0, 1, 2], [0, 2, 4]),
    ],
)
def test_keys_that_are_no_chain_of_segments_are_refused(index, cu_q, cu_k):
    cumulated = (torch.tensor(one, dtype=torch.int32) for one in (cu_q, cu_k))
    with pytest.raises(ConfigError, match="lays out its rows in another way"):
        tree.table_of_tree(torch.tensor(index), *cumulated)


def test_soft_capping_is_refused():
    tree.register_tree_attention()
    model = tiny.model("gemma2")
    model.set_attn_implementation(tree.TREE_ATTENTION)
    with pytest.raises(PackingError, match="uses softcap"):
        tree_log_probs(model, row_of(samples_of(0)))


def test_the_name_is_the_one_that_trl_gives_its_rows():
    assert trls.TREE_ATTENTION == tree.TREE_ATTENTION
    assert LlamaConfig(attn_implementation=trls.TREE_ATTENTION)._attn_implementation == tree.TREE_ATTENTION
