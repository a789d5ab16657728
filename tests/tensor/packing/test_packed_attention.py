"""Packed attention: no leak between segments, refusals, and what a model does without segments."""

from types import FunctionType
from unittest.mock import Mock

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tests import tiny
from tests.batches import RAGGED, batch, packed_logits, ready_to_pack
from trl_ext.errors import PackingError
from trl_ext.packing import attention, kernels
from trl_ext.packing.layout import lay_out
from trl_ext.packing.plan import plan_rows
from trl_ext.packing.step_plan import RowSize
from trl_ext.packing.table import SegmentTable
from trl_ext.trainers.step.score import forward, score
from trl_ext.trainers.step.unpadded import plan, unpad

torch.set_num_threads(1)
CPU = torch.device("cpu")


@pytest.mark.parametrize("share_prompt", [True, False])
@pytest.mark.parametrize("family", tiny.PACKABLE)
def test_changing_one_segment_leaves_the_others_logits_bitwise_equal(family, share_prompt):
    model = tiny.model(family).eval()
    attention.take_segments(model.config)
    given = batch((12, (6, 9, 4)), (7, (5, 5)))
    changed = batch((12, (6, 9, 4)), (7, (5, 5)))
    changed.input_ids[1, -given.width :] = (changed.input_ids[1, -given.width :] + 1) % tiny.VOCAB
    segments, before = packed_logits(model, given, share_prompt)
    _, after = packed_logits(model, changed, share_prompt)
    for segment in segments:
        span = slice(segment.start, segment.end)
        if segment.item == 1 and not segment.is_prefix:
            assert not torch.equal(before[span], after[span])
        else:
            assert torch.equal(before[span], after[span])


@pytest.fixture
def names_as_shipped(monkeypatch) -> dict:
    """Attention by name as before this process packed anything; returns what is registered, [masks or not][name]."""
    registered = {}
    for masks, interface in enumerate((AttentionInterface, AttentionMaskInterface)):
        plain = {name: getattr(found, "plain", found) for name, found in interface._global_mapping.items()}
        monkeypatch.setattr(interface, "_global_mapping", plain)
        registered[masks] = plain
    monkeypatch.setattr(attention, "_dispatched", set())
    return registered


@pytest.mark.parametrize("family", tiny.PACKABLE)
def test_without_segments_a_model_is_bit_for_bit_what_it_was(family, names_as_shipped):
    model = tiny.model(family).eval()
    inputs = {"input_ids": RAGGED.input_ids, "attention_mask": RAGGED.attention_mask}
    with torch.no_grad():
        before = model(**inputs).logits
        attention.take_segments(model.config)
        assert torch.equal(before, model(**inputs).logits)
    assert model.config._attn_implementation == "sdpa"


def test_generation_with_a_cache_is_what_it_was(names_as_shipped):
    model = tiny.model("llama").eval()
    ids, mask = RAGGED.input_ids[:, :20], RAGGED.attention_mask[:, :20]
    ask = dict(input_ids=ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
    before = model.generate(**ask)
    attention.take_segments(model.config)
    assert torch.equal(before, model.generate(**ask))


def test_a_name_is_registered_once(names_as_shipped):
    model = tiny.model("llama")
    attention.take_segments(model.config)
    once = [dict(names) for names in names_as_shipped.values()]
    attention.take_segments(tiny.model("qwen2").config)
    with attention.packed_forward():
        assert once == list(names_as_shipped.values())
    assert all(isinstance(names["sdpa"].plain, FunctionType) for names in once)


def test_eager_attention_gives_way_to_sdpa_and_its_name_is_told():
    model = tiny.model("gemma2")
    assert attention.take_segments(model.config) == "eager"
    assert model.config._attn_implementation == "sdpa"


def test_a_keyword_of_the_same_name_that_is_not_ours_is_passed_on():
    seen = {}
    attention.AttentionDispatch("sdpa", lambda *args, **kwargs: seen.update(kwargs))(
        None, segments="theirs", scaling=1
    )
    assert seen == {"segments": "theirs", "scaling": 1}


def test_who_registers_a_name_later_serves_plain_forwards_and_no_packed_ones(names_as_shipped):
    """transformers itself does so whenever it loads a kernel from the hub."""
    model = tiny.model("llama").eval()
    attention.take_segments(model.config)
    given = batch((12, (6, 9)))
    _, before = packed_logits(model, given)
    calls = []

    def theirs(*args, **kwargs):
        calls.append(kwargs)
        return sdpa_attention_forward(*args, **kwargs)

    AttentionInterface.register("sdpa", theirs)
    _, after = packed_logits(model, given)
    assert torch.equal(before, after)
    assert not calls
    with torch.no_grad():
        model(input_ids=given.input_ids)
    assert len(calls) == model.config.num_hidden_layers


def test_a_kernel_of_the_hub_that_does_not_come_or_is_not_flash_attention_is_refused(monkeypatch):
    for reason in (OSError("no connection"), ImportError("no kernels"), None):
        lookup = Mock(side_effect=reason, return_value=None)
        monkeypatch.setattr(attention, "flash_varlen_function", lookup)
        with pytest.raises(PackingError, match=str(reason or "not one of flash-attention's")):
            attention.dispatch_on_segments("kernels-community/sparse")


def table_of(*rows):
    (row,) = plan_rows([RowSize(*sizes) for sizes in rows])
    return SegmentTable(row.segments, CPU)


def test_a_mask_ends_in_the_lower_right_corner():
    table = table_of((0, 3, 2), (0, 3, 2))
    for window, first in ((None, 1), (4, 0)):
        expected = torch.tensor([[1, 1, 1, 1, 0], [first, 1, 1, 1, 1]], dtype=torch.bool)
        assert torch.equal(table.mask(table.segments[1], window), expected)


def test_keys_are_gathered_prefix_first_where_something_is_shared():
    table = table_of((0, 2, 1), (0, 2, 1))
    assert table.copies.index.tolist() == [0, 1, 0, 1, 2, 0, 1, 3]
    assert table.cu_seqlens.tolist() == [0, 2, 3, 4]
    assert table.copies.cu_seqlens.tolist() == [0, 2, 5, 8]
    assert table_of((0, 0, 4), (1, 0, 3)).copies.index is None


def test_an_attention_feature_it_does_not_compute_is_refused():
    x, table = torch.zeros(1, 2, 4, 8), table_of((0, 0, 4))
    for extra in ("softcap", "s_aux", "position_bias"):
        with pytest.raises(PackingError, match=extra):
            attention.attend(torch.nn.Module(), x, x, x, None, base="sdpa", segments=table, **{extra: 1.0})


def test_ragged_kernels_get_what_the_reference_computes(monkeypatch):
    """The gather that varlen kernels are fed with, checked against the reference by a kernel written out here."""
    table, draw = table_of((0, 5, 2), (0, 5, 4), (1, 0, 3)), torch.Generator().manual_seed(0)
    num_tokens = table.segments[-1].end
    q = torch.randn(1, 4, num_tokens, 8, generator=draw)
    k, v = (torch.randn(1, 2, num_tokens, 8, generator=draw) for _ in range(2))

    def kernel(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, window_left):
        out = []
        for i in range(len(cu_q) - 1):
            qs, ks, vs = q[cu_q[i] : cu_q[i + 1]], k[cu_k[i] : cu_k[i + 1]], v[cu_k[i] : cu_k[i + 1]]
            ks, vs = (x.repeat_interleave(2, dim=1) for x in (ks, vs))
            logits = torch.einsum("qhd,khd->hqk", qs, ks) * scale
            gap = len(ks) - len(qs)
            seen = torch.arange(len(ks))[None] - torch.arange(len(qs))[:, None] - gap
            allowed = (seen <= 0) & ((seen >= -window_left) if window_left >= 0 else True)
            out.append(torch.einsum("hqk,khd->qhd", logits.masked_fill(~allowed, -1e9).softmax(-1), vs))
        return torch.cat(out)

    monkeypatch.setattr("trl_ext.packing.kernels.call_varlen_attn", kernel)
    for window in (None, 3):
        ours = kernels.varlen_attention(q, k, v, table, scale=0.3, window=window)
        reference = kernels.sdpa_attention(q, k, v, table, scale=0.3, window=window)
        assert (ours - reference).abs().max() < 1e-6


@pytest.mark.parametrize("heads", [(4, 2), (3, 3)])
def test_short_runs_in_half_precision_are_nearer_to_the_exact_gradient_than_pytorchs(heads, monkeypatch):
    """Their backward is in float32: faster on the CPU, and rounded once."""
    table, draw = table_of((0, 50, 100), (0, 50, 37), (1, 0, 150), (2, 3, 200)), torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, n, table.segments[-1].end, 16, generator=draw).bfloat16() for n in (heads[0], *heads[1:] * 2)
    )
    grad = torch.randn(1, table.segments[-1].end, heads[0], 16, generator=draw).bfloat16()

    def results(dtype, window):
        inputs = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        out = kernels.sdpa_attention(*inputs, table, scale=0.3, window=window)
        return [out.detach(), *torch.autograd.grad(out, inputs, grad.to(dtype))]

    def errors(window):
        exact = results(torch.float64, window)
        found = zip(results(torch.bfloat16, window), exact, strict=True)
        return [((one.double() - other).norm() / other.norm()).item() for one, other in found]

    for window in (None, 20):
        ours = errors(window)
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "backward_type", lambda num_queries, dtype: dtype)
            plain = errors(window)
        assert ours[0] == plain[0], "the forward is PyTorch's"
        assert all(one <= other < 2e-2 for one, other in zip(ours, plain, strict=True))
        monkeypatch.setattr(kernels, "cpu_attention_shares_keys", lambda: False)
        assert all(one < 2e-2 for one in errors(window))
        monkeypatch.undo()


def test_scores_return_to_their_row_and_column():
    model = ready_to_pack(tiny.model("llama").eval())
    flat = unpad(RAGGED.input_ids, RAGGED.attention_mask, RAGGED.width)
    with torch.no_grad():
        together = score(model, flat, plan(flat, True), torch.device("cpu")).logps
        apart = score(model, flat, plan(flat, True, max_tokens=45), torch.device("cpu")).logps
    assert torch.equal(together != 0, RAGGED.attention_mask[:, -RAGGED.width :].bool())
    assert (together - apart).abs().max() < 5e-6


def test_the_first_token_of_a_segment_is_not_scored():
    flat = unpad(RAGGED.input_ids, RAGGED.attention_mask, RAGGED.width)
    for share in (True, False):
        (row,) = plan(flat, share)
        packed = lay_out(row, flat.sequences, flat.num_scored)
        assert not {s.start for s in row.segments} & set((packed.before_index + 1).tolist())
        assert len(packed.before_index) == sum(flat.num_scored)


def test_a_packed_forward_needs_no_mask_of_the_whole_row(monkeypatch):
    model = ready_to_pack(tiny.model("llama").eval())
    dense = attention.MaskDispatch("sdpa", lambda *_, **__: pytest.fail("a [T, T] mask was built"))
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "sdpa", dense)
    flat = unpad(RAGGED.input_ids, RAGGED.attention_mask, RAGGED.width)
    (row,) = plan(flat, True)
    with torch.no_grad(), attention.packed_forward():
        forward(model, lay_out(row, flat.sequences, flat.num_scored))
