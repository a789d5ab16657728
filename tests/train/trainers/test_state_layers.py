"""Layers that carry state along the row are packed and share prompts, with their kernels and without."""

import importlib

import pytest
import torch
import trl

import trl_ext
from tests import ppo_trainers, reward_trainers, state_kernels, tiny
from tests.batches import forked
from tests.grpo_trainers import learned, trained
from tests.nightly import daily, nightly
from tests.train.trainers.grpo.test_grpo_exactness import LOGP_TOLERANCE, check_exact, trainer
from trl_ext.errors import PackingError

pytestmark = pytest.mark.own_self_check

IDS = torch.arange(3, 40)[None]
# A recurrence rounds by the sizes of its chunks.
WEIGHT_TOLERANCE = 1e-5


@pytest.fixture
def install(monkeypatch):
    """Install the kernels of a family's model file."""

    def of(family: str, *without: str):
        modeling = importlib.import_module(type(tiny.model(family)).__module__)
        state_kernels.install(monkeypatch, modeling, *without)
        return modeling

    return of


KERNELS = ("qwen3_5", "granite4", "falcon_h1")  # families whose kernels are asked by day


@pytest.mark.parametrize(
    ("family", "with_kernels"),
    [
        (family, on) if on == (family in KERNELS) else nightly(family, on)
        for family in tiny.STATEFUL
        for on in (False, True)
    ],
)
def test_packed_rows_share_prompts_and_score_as_each_row_alone(family, with_kernels, install, tmp_path, caplog):
    reference = tiny.model(family).train()
    without_kernels = reference(IDS).logits
    if with_kernels:
        install(family)
        # Alone, the kernels compute what transformers does without them.
        assert (reference(IDS).logits - without_kernels).abs().max() < LOGP_TOLERANCE
    subject = trainer(tiny.model(family), tmp_path, temperature=0.7)
    assert subject.step_settings.share_prompt
    assert not [one for one in reward_trainers.warnings_of(caplog) if "pack" in one]
    subject.model.train()
    check_exact(subject, reference, temperature=0.7)


@pytest.mark.parametrize("family", daily(tiny.STATEFUL, "qwen3_5", "lfm2", "falcon_h1"))
def test_rows_that_fork_go_on_from_the_states_of_their_common_beginnings(family, tmp_path):
    subject = trainer(tiny.model(family), tmp_path)
    subject.model.train()
    for seed in (0, 3, 5):
        check_exact(subject, tiny.model(family).train(), forked(seed))


@pytest.mark.parametrize("family", daily(tiny.STATEFUL, "qwen3_next", "bamba"))
def test_rows_that_share_nothing_are_left_to_kernels(family, install, tmp_path):
    """Mamba-2's layers in training by their fused kernel, which the row alone takes as well."""
    install(family)
    subject = trainer(tiny.model(family), tmp_path, share_prompt=False)
    subject.model.train()
    check_exact(subject, tiny.model(family))


@pytest.mark.parametrize("reentrant", daily([False, True], False))
@pytest.mark.parametrize("family", ["qwen3_5", "granite4"])
def test_so_they_do_under_gradient_checkpointing(family, reentrant, tmp_path):
    subject = trainer(tiny.model(family), tmp_path, gradient_checkpointing=True)
    subject.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    subject.model.train()
    check_exact(subject, tiny.model(family))


@pytest.mark.parametrize(
    ("family", "kernel"), [("qwen3_5", "torch_chunk_gated_delta_rule"), ("bamba", "mamba2_chunk_scan")]
)
def test_where_a_kernel_ignores_the_state_of_a_prompt_none_is_shared(
    family, kernel, install, tmp_path, monkeypatch, caplog
):
    modeling = install(family)
    good = getattr(modeling, kernel)
    ignored = {"initial_state": None, "initial_states": None}
    monkeypatch.setattr(modeling, kernel, lambda *args, **kwargs: good(*args, **kwargs | ignored))
    subject = trainer(tiny.model(family), tmp_path)
    assert any("is packed without sharing prompts: log-prob" in one for one in reward_trainers.warnings_of(caplog))
    subject.model.train()
    check_exact(subject, tiny.model(family))


@pytest.mark.parametrize(
    ("family", "kernel"),
    [
        nightly("qwen3_5", "torch_chunk_gated_delta_rule"),
        ("qwen3_5", "causal_conv1d_fn"),
        ("bamba", "mamba2_split_conv1d_scan_combined"),  # asked in training only
    ],
)
def test_a_kernel_that_ignores_where_sequences_begin_is_found_out(family, kernel, install, tmp_path, monkeypatch):
    modeling = install(family)
    good = getattr(modeling, kernel)
    ignored = {"cu_seqlens": None, "seq_idx": None}
    monkeypatch.setattr(modeling, kernel, lambda *args, **kwargs: good(*args, **kwargs | ignored))
    with pytest.raises(PackingError, match="cannot be packed"):
        trainer(tiny.model(family), tmp_path)


@pytest.mark.parametrize("family", daily(tiny.STATEFUL, "falcon_h1"))
def test_three_steps_of_grpo_are_trls(family, tmp_path):
    # A mixture's auxiliary loss would keep a micro-batch whole.
    options = dict(max_steps=3, gradient_accumulation_steps=2, router_aux_loss_coef=0.0)
    ours, theirs = (
        learned(trained(tmp_path, library, family, **options, **own))
        for library, own in ((trl_ext, {"packing": True, "max_tokens_per_forward": 60}), (trl, {}))
    )
    assert (ours - theirs).abs().max() <= WEIGHT_TOLERANCE


@pytest.mark.parametrize("family", daily(["qwen3_next", "qwen3_5"], "qwen3_5"))  # transformers has no others
def test_three_steps_of_a_reward_model_are_trls(family, tmp_path):
    subjects = [
        reward_trainers.trainer(tmp_path, library=library, model=family, max_steps=3, **options)
        for library, options in ((trl_ext, {"packing": True}), (trl, {}))
    ]
    assert subjects[0]._share_prompt
    for subject in subjects:
        subject.train()
    ours, theirs = map(reward_trainers.weights, subjects)
    assert (ours - theirs).abs().max() <= WEIGHT_TOLERANCE


@pytest.mark.parametrize("family", daily(tiny.STATEFUL, "qwen3_5"))
def test_three_steps_of_ppo_are_those_of_padded_rows(family, tmp_path):
    found = []
    for packing in (True, False):
        models = dict(model=tiny.model(family))
        if is_separate := family in ("qwen3_next", "qwen3_5"):  # of which transformers has classifiers
            models["value_model"] = ppo_trainers.classifier(family=family)
        critic = "separate" if is_separate else "head"
        subject = ppo_trainers.trainer(
            critic, tmp_path, max_steps=3, packing=packing, router_aux_loss_coef=0.0, **models
        )
        subject.train()
        found.append(ppo_trainers.trained_weights(subject))
    assert ppo_trainers.distance(*found) <= WEIGHT_TOLERANCE


def test_a_layer_that_does_not_pass_on_where_sequences_begin_is_found_out(tmp_path, monkeypatch):
    """As LFM2's in transformers 5.17: what its convolutions leak is less than what the self-check tolerates."""
    model = tiny.model("lfm2")
    mixer = type(model.model.layers[0].conv)
    forward = mixer.forward
    monkeypatch.setattr(mixer, "forward", lambda self, hidden_states, **_: forward(self, hidden_states))
    with pytest.raises(PackingError, match="do not pass on where sequences begin"):
        trainer(model, tmp_path)
