"""Windows of attention in packed rows: taken from where transformers takes them, or the model is not packed."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from tests import tiny
from tests.batches import alone, batch, ready_to_pack
from trl_ext.errors import PackingError
from trl_ext.packing import attention
from trl_ext.packing.check import CheckResult, longest_window, probes
from trl_ext.packing.plan import plan_rows
from trl_ext.packing.step_plan import RowSize
from trl_ext.packing.table import SegmentTable
from trl_ext.trainers.step.score import score
from trl_ext.trainers.step.self_check import check_causal_model
from trl_ext.trainers.step.unpadded import plan, unpad

torch.set_num_threads(1)

WINDOW = 32
# Completions begin and end within and beyond the window of their prompt, which is shared, or of their own.
LONG = batch((70, (60, 5, 33)), (20, (30, 1)), (3, (90,)))
FAMILIES = {
    "mistral_window": {},
    "gemma3": {},
    "phimoe_window": {},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1},
}


def packable(family: str, **changes) -> torch.nn.Module:
    return ready_to_pack(tiny.model(family, sliding_window=WINDOW, **changes).eval())


def self_check(model: torch.nn.Module) -> CheckResult:
    return check_causal_model(
        model, model.config, torch.device("cpu"), nullcontext, half_precision=False, share_prompt=True
    )


@pytest.mark.parametrize("share_prompt", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_longer_than_the_window_score_as_each_row_alone(family, share_prompt):
    flat = unpad(LONG.input_ids, LONG.attention_mask, LONG.width)
    model = packable(family, **FAMILIES[family])
    with torch.no_grad():
        packed = score(model, flat, plan(flat, share_prompt), torch.device("cpu")).logps
        expected, _ = alone(tiny.model(family, sliding_window=WINDOW, **FAMILIES[family]).eval(), LONG)
        without, _ = alone(tiny.model(family, sliding_window=400, **FAMILIES[family]).eval(), LONG)
    assert (packed - expected).abs().max() < 5e-6
    assert (without - expected).abs().max() > 1e-3, "the window changes nothing, so nothing is compared"


@pytest.mark.parametrize("family", ["doge", "doge_window"])
def test_a_model_whose_layers_make_masks_of_their_own_cannot_be_packed(family):
    result = self_check(ready_to_pack(tiny.model(family).eval()))
    assert not result.is_exact
    assert "mask" in result.failure.lower()


def attend(mask: object, base: str = "sdpa", **options: int) -> torch.Tensor:
    """One packed layer on a row of 6 tokens."""
    (row,) = plan_rows([RowSize(0, 0, 6)])
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 6, 8, generator=draw) for _ in range(3))
    out, _ = attention.attend(
        torch.nn.Module(), q, k, v, mask, base=base, segments=SegmentTable(row.segments, q.device), **options
    )
    return out


def test_the_window_is_read_where_transformers_reads_it():
    everything, windowed = attend(None), attend(attention.WindowMask(2))
    assert not torch.equal(everything, windowed)
    assert torch.equal(attend(None, sliding_window=2), everything)  # sdpa takes no keyword
    assert torch.equal(attend(None, base="flash_attention_2", sliding_window=2), windowed)
    with pytest.raises(PackingError, match="its own mask"):
        attend(torch.zeros(1, 1, 6, 6))


def mask_in_a_packed_forward(base: str, config: dict[str, int], **options: object) -> object:
    with attention.packed_forward():
        return attention.MaskDispatch(base, None)(config=SimpleNamespace(**config), **options)


def test_a_packed_forward_keeps_the_window_of_a_mask():
    assert mask_in_a_packed_forward("sdpa", {}) is None
    assert mask_in_a_packed_forward("sdpa", {"sliding_window": 5}, local_size=5) == attention.WindowMask(5)
    assert mask_in_a_packed_forward("flash_attention_2", {"sliding_window": 5}, local_size=5) is None


def test_a_mask_that_is_neither_causal_nor_a_window_is_refused():
    chunks, function_over_it = ({"attention_chunk_size": 8}, {"local_size": 8}), ({}, {"use_vmap": True})
    for config, options in (chunks, function_over_it):
        with pytest.raises(PackingError, match="neither causal nor a sliding window"):
            mask_in_a_packed_forward("sdpa", config, **options)


def test_the_check_knows_the_windows_that_a_config_names_and_its_rows_go_beyond_them():
    for fields, window in (
        ({}, 0),
        ({"sliding_window": 32, "max_window_layers": 28}, 32),
        ({"attention_chunk_size": 64, "keep_window_size": 100, "sliding_window": None}, 100),
        ({"attention_window": [16, 48]}, 48),
        ({"sliding_window": 4096}, 0),  # too long for a check, and read from the mask
        ({"sliding_window": 200, "max_position_embeddings": 128}, 0),  # no row is so long
    ):
        assert longest_window(SimpleNamespace(to_dict=lambda fields=fields: fields, **fields)) == window, fields
    assert [len(probe.prompt) for probe in probes(tiny.VOCAB, WINDOW)][-2:] == [WINDOW + 2, WINDOW + 2]
    assert probes(tiny.VOCAB, WINDOW)[:-2] == probes(tiny.VOCAB)


@pytest.mark.parametrize("family", ["mistral_window", "phimoe_window"])
def test_the_check_notices_a_window_that_is_lost(family, monkeypatch):
    model = packable(family)
    assert self_check(model).is_exact
    monkeypatch.setattr(attention, "_window", lambda *_: None)
    assert not self_check(model).is_exact
