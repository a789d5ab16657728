"""Layers that carry state along the row are packed where their kernels are installed, and refused where not."""

import copy
import importlib

import pytest
import torch
import trl

import trl_ext
from tests import ppo_trainers, reward_trainers, state_kernels, tiny
from tests.grpo_trainers import WEIGHT_TOLERANCE
from tests.preferences import reward_model
from tests.train.trainers.grpo.test_grpo_exactness import LOGP_TOLERANCE, check_exact, trainer
from tests.train.trainers.grpo.test_grpo_step import weights_after
from trl_ext.errors import PackingError
from trl_ext.trainers.reward.scorer import RewardModel

# Of the packages that a family needs one, without which it is not packed.
NEEDED = {
    "qwen3_next": "fla",
    "qwen3_5": "fla",
    "lfm2": "causal_conv1d",
    "bamba": "mamba_ssm",
    "granite4": "mamba_ssm",
    "falcon_h1": "causal_conv1d",
}
IDS = torch.arange(3, 40)[None]


@pytest.fixture
def install(monkeypatch):
    """Install the kernels of a family's model file."""

    def of(family: str, *without: str):
        modeling = importlib.import_module(type(tiny.model(family)).__module__)
        state_kernels.install(monkeypatch, modeling, *without)
        return modeling

    return of


@pytest.mark.parametrize("family", tiny.STATEFUL)
def test_packed_rows_score_as_each_row_alone(family, install, tmp_path, caplog):
    """Mamba-2's layers in training by their fused kernel, which the row alone takes as well."""
    reference = tiny.model(family)
    without_kernels = reference(IDS).logits
    install(family)
    # Alone, the kernels compute what transformers does without them.
    for mode in (reference.eval(), reference.train()):
        assert (mode(IDS).logits - without_kernels).abs().max() < LOGP_TOLERANCE
    subject = trainer(tiny.model(family), tmp_path, temperature=0.7)
    sentence = "is packed without sharing prompts, since its layers carry state along the row."
    assert [one for one in reward_trainers.warnings_of(caplog) if "pack" in one] == [
        f"{type(reference).__name__} {sentence}"
    ]
    subject.model.train()
    check_exact(subject, reference, temperature=0.7)


@pytest.mark.parametrize("family", ["qwen3_5", "granite4"])
def test_so_they_do_under_gradient_checkpointing(family, install, tmp_path):
    install(family)
    subject = trainer(tiny.model(family), tmp_path, gradient_checkpointing=True)
    subject.model.gradient_checkpointing_enable({"use_reentrant": False})
    subject.model.train()
    check_exact(subject, tiny.model(family))


@pytest.mark.parametrize("family", tiny.STATEFUL)
def test_one_package_that_is_missing_is_named(family, install, tmp_path):
    install(family, NEEDED[family])
    name = {"fla": "flash-linear-attention"}.get(NEEDED[family], NEEDED[family])
    with pytest.raises(PackingError, match=f"Install `{name}`.*are packed where their kernels are installed"):
        trainer(tiny.model(family), tmp_path)


@pytest.mark.parametrize(
    ("family", "kernel"),
    [
        ("qwen3_5", "torch_chunk_gated_delta_rule"),
        ("qwen3_5", "causal_conv1d_fn"),
        ("bamba", "mamba2_chunk_scan"),
        ("bamba", "mamba2_split_conv1d_scan_combined"),  # asked in training only
    ],
)
def test_a_kernel_that_ignores_where_sequences_begin_is_found_out(family, kernel, install, tmp_path, monkeypatch):
    modeling = install(family)
    good = getattr(modeling, kernel)
    ignored = {"cu_seqlens": None, "seq_idx": None}
    monkeypatch.setattr(modeling, kernel, lambda *args, **kwargs: good(*args, **kwargs | ignored))
    with pytest.raises(PackingError, match="when a neighbour's tokens change"):
        trainer(tiny.model(family), tmp_path)


def test_a_step_is_trls(install, tmp_path):
    install("qwen3_5")
    ours = weights_after(trl_ext, tmp_path, family="qwen3_5", max_tokens_per_forward=60)
    theirs = weights_after(trl, tmp_path, family="qwen3_5")
    assert (ours - theirs).abs().max() <= WEIGHT_TOLERANCE


def test_a_reward_model_trains_on_pairs_that_share_nothing_and_as_trls(install, tmp_path):
    install("qwen3_5")
    subjects = [
        reward_trainers.trainer(tmp_path, library=library, model="qwen3_5", max_steps=2, **options)
        for library, options in ((trl_ext, {"packing": True}), (trl, {}))
    ]
    for subject in subjects:
        subject.train()
    ours, theirs = map(reward_trainers.weights, subjects)
    assert (ours - theirs).abs().max() <= WEIGHT_TOLERANCE


def test_a_reward_model_in_ppo_scores_completions_that_share_nothing_as_alone(install, tmp_path):
    install("qwen3_5")
    model = reward_model(tmp_path, "qwen3_5")
    texts = [tiny.words(5, 6, 7) + " " + tiny.words(*answer) for answer in ((8, 9), (10,), (11, 12, 13))]
    alone = copy.deepcopy(model).eval()
    tokenizer = tiny.tokenizer()
    ids = [tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"] for text in texts]
    with torch.no_grad():
        expected = torch.cat([alone(input_ids=one).logits[:, 0] for one in ids])
    subject = RewardModel(model, tokenizer, "tiny", eos="never")
    prompt = tiny.words(5, 6, 7) + " "
    scores = subject([prompt] * 3, [text.removeprefix(prompt) for text in texts])
    assert subject.packs
    assert (scores - expected).abs().max() < LOGP_TOLERANCE


def test_ppo_with_a_separate_critic_packs_both(install, tmp_path):
    install("qwen3_5")
    found = []
    for packing in (True, False):
        models = dict(model=tiny.model("qwen3_5"), value_model=ppo_trainers.classifier(family="qwen3_5"))
        subject = ppo_trainers.trainer("separate", tmp_path, max_steps=1, packing=packing, **models)
        subject.train()
        found.append(ppo_trainers.trained_weights(subject))
    assert ppo_trainers.distance(*found) <= WEIGHT_TOLERANCE
