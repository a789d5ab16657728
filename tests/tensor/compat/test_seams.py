"""The seam table: what we hold on to in TRL is where we think it is."""

import pytest
import torch

from trl_ext import GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer
from trl_ext.compat import torch as compat_torch
from trl_ext.compat import versions
from trl_ext.compat.seams import SEAMS, missing_parameters
from trl_ext.compat.trl import check_fused_head, head_in_cache
from trl_ext.errors import SupportError


@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: seam.where)
def test_seam_has_the_parameters_we_count_on(seam):
    assert missing_parameters(seam) == []


OVERRIDES = [
    f"{trainer.__name__}.{name}"
    for trainer in (GRPOTrainer, RewardTrainer)
    for name, member in vars(trainer).items()
    if "Overrides" in (member.__doc__ or "")
]


@pytest.mark.parametrize("override", OVERRIDES)
def test_every_override_stands_in_the_table(override):
    assert any(seam.where.endswith(f":{override}") for seam in SEAMS)


@pytest.mark.parametrize("config", [GRPOConfig, RewardConfig])
def test_fields_of_our_config_do_not_hide_fields_of_trls(config):
    import trl

    assert not set(config.__annotations__) & set(getattr(trl, config.__name__).__dataclass_fields__)


def test_a_version_outside_the_window_is_refused_with_the_command_to_run(monkeypatch):
    monkeypatch.setitem(versions.SUPPORTED, "trl", ("99.0", None))
    with pytest.raises(SupportError, match=r"pip install 'trl>=99\.0'"):
        versions.check_versions()


def test_trl_1_15_on_a_cpu_is_refused_with_the_command_to_run(monkeypatch):
    monkeypatch.setattr(versions, "version", lambda package: "1.15.0")
    check_fused_head("cuda")
    with pytest.raises(SupportError, match=r"pip install 'trl>=1\.16"):
        check_fused_head("cpu")


@pytest.mark.parametrize(("device", "is_narrow"), [("cpu", True), ("cuda", False)])
def test_a_processor_has_narrow_tiles_of_the_head_within_the_block(device, is_narrow):
    from trl.trainer import utils

    wide = utils._CHUNKED_LOGPROB_CHUNK_SIZE
    with head_in_cache(device):
        assert (utils._CHUNKED_LOGPROB_CHUNK_SIZE < wide) == is_narrow
    assert utils._CHUNKED_LOGPROB_CHUNK_SIZE == wide


@pytest.mark.parametrize(
    "accepted",
    [{"scale", "window_size", "enable_gqa"}, {"scale", "window_size"}],
    ids=["torch 2.12 and later", "torch 2.11"],
)
def test_varlen_attention_is_called_as_the_installed_signature_wants(accepted, monkeypatch):
    calls = {}

    def varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, **options):
        calls.update(options, heads=(q.shape[1], k.shape[1]))
        assert set(options) <= accepted
        return q

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    monkeypatch.setattr(compat_torch, "_varlen_parameters", lambda: frozenset(accepted))
    q, k = torch.zeros(5, 4, 8), torch.zeros(5, 2, 8)
    compat_torch.call_varlen_attn(q, k, k, None, None, 5, 5, scale=0.5, window_left=-1)
    assert calls["window_size"] == (-1, 0)
    assert calls["scale"] == 0.5
    assert calls["heads"] == ((4, 2) if "enable_gqa" in accepted else (4, 4))
