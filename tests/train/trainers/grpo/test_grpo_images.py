"""Images in flat rows: weights after three steps are those of TRL's padded batches."""

import numpy as np
import pytest
import trl
from peft import LoraConfig

import trl_ext
from tests import grpo_trainers, tiny_images
from tests.grpo_trainers import WEIGHT_TOLERANCE, learned, trained
from tests.nightly import daily, nightly
from tests.tiny_images import image, rows
from trl_ext.errors import ConfigError, DataError, PackingError
from trl_ext.packing import step_plan
from trl_ext.packing.families.images import BatchImages
from trl_ext.trainers.step.unpadded import shareable

# Two images, one, none, and the same text with another one.
SHOWN = [[image(1), image(2, 24, 16)], [image(3, 16, 24)], [], [image(4)]]
SETTINGS = dict(
    max_steps=3,
    per_device_eval_batch_size=8,
    per_device_train_batch_size=8,
    steps_per_generation=2,
    gradient_accumulation_steps=2,
)


def run(folder, library=trl_ext, family="qwen2_5_vl", **changes):
    options = dict(processing_class=tiny_images.processor(), rollout_func=tiny_images.completions)
    options |= dict(data=rows(SHOWN * 2)) | SETTINGS | changes
    model = tiny_images.model(family)
    if changes.get("beta"):  # TRL loads the reference by the model's name
        model.config._name_or_path = f"{folder}/model"
        model.save_pretrained(f"{folder}/model")
    return trained(folder, library, model, **options)


@pytest.mark.parametrize("family", tiny_images.FAMILIES)
def test_weights_are_trls(family, tmp_path):
    ours = learned(run(tmp_path, trl_ext, family, packing=True))
    assert (ours - learned(run(tmp_path, trl, family))).abs().max() <= WEIGHT_TOLERANCE


@pytest.mark.parametrize(
    "changes",
    [
        nightly(dict(loss_type="bnpo")),
        nightly(dict(max_tokens_per_forward=48)),
        nightly(dict(top_entropy_quantile=0.5)),
        dict(share_prompt=False, gradient_checkpointing=True),
        dict(peft_config=LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"), learning_rate=1e-2),
        dict(family="qwen3_5", max_tokens_per_forward=48, gradient_checkpointing=True),
        dict(num_iterations=2, steps_per_generation=4, beta=0.1),
    ],
    ids=lambda changes: "-".join(changes),
)
def test_weights_are_trls_with(changes, tmp_path):
    own = ("max_tokens_per_forward", "share_prompt")
    ours = learned(run(tmp_path, packing=True, **changes))
    theirs = learned(run(tmp_path, trl, **{name: value for name, value in changes.items() if name not in own}))
    assert (ours - theirs).abs().max() <= WEIGHT_TOLERANCE


def patches(folder, library=trl_ext, **changes):
    """Patches through the vision tower in each of its calls of one step, and the trainer."""
    made, calls = tiny_images.model("qwen2_5_vl"), []
    made.base_model.visual.register_forward_pre_hook(lambda _tower, args: calls.append(len(args[0])))
    subject = grpo_trainers.trainer(
        folder,
        library,
        made,
        processing_class=tiny_images.processor(),
        rollout_func=tiny_images.completions,
        **SETTINGS | dict(max_steps=1, data=rows(SHOWN)) | changes,
    )
    calls.clear()  # those of the self-check
    subject.train()
    return calls, subject


def test_the_vision_tower_sees_an_image_once_a_group(tmp_path):
    ours, subject = patches(tmp_path)
    assert subject._packs
    assert sum(ours) == 16 + 24 + 24 + 16
    theirs, _ = patches(tmp_path, trl)
    assert sum(theirs) == 4 * sum(ours)


@pytest.mark.parametrize("family", daily(list(tiny_images.FAMILIES)[:2], "qwen2_5_vl"))
def test_the_vision_tower_sees_an_image_once_where_a_group_takes_several_forwards(family, tmp_path, monkeypatch):
    monkeypatch.setattr(step_plan, "CALL_COST", 0)
    shown = [[image(1), image(2, 24, 16)], [image(3, 16, 24)], [image(4)], [image(5)]]  # TRL stops at rows without
    cut = dict(per_device_train_batch_size=2, steps_per_generation=8, gradient_accumulation_steps=8)
    cut |= dict(data=rows(shown * 2))
    ours = run(tmp_path, trl_ext, family, packing=True, beta=0.1, **cut)
    theirs = learned(run(tmp_path, trl, family, beta=0.1, **cut))
    assert (learned(ours) - theirs).abs().max() <= WEIGHT_TOLERANCE
    calls, _ = patches(tmp_path, **cut | dict(data=rows(shown), skip_zero_advantage=False))
    assert sum(calls) == 16 + 24 + 24 + 16 + 16


@pytest.mark.own_self_check
def test_the_self_check_notices_positions_that_count_tokens(tmp_path, monkeypatch):
    def counted(sequences, *_):
        return [np.arange(length)[None].repeat(3, axis=0) for length in sequences.lengths]

    monkeypatch.setattr("trl_ext.packing.families.images._positions", counted)
    with pytest.raises(PackingError, match="log-probabilities differ by"):
        run(tmp_path, packing=True)


@pytest.mark.own_self_check
def test_the_self_check_notices_features_at_places_of_others(tmp_path, monkeypatch):
    shown = BatchImages._shown
    monkeypatch.setattr(BatchImages, "_shown", lambda self, names: shown(self, names)[::-1])
    with pytest.raises(PackingError, match="log-probabilities differ by"):
        run(tmp_path, packing=True)


def with_image_token(prompts, trainer):
    """Completions of which the fourth holds the token that stands for an image."""
    found = tiny_images.completions(prompts, trainer)
    found["completion_ids"][3] = [9, tiny_images.IMAGE, 9]
    return found


def test_a_completion_with_an_image_token_is_named(tmp_path):
    with pytest.raises(DataError, match=r"^Row 3 has \d+ image tokens \(id 3\), and its \d images"):
        run(tmp_path, rollout_func=with_image_token)


def test_rows_with_images_are_not_oversampled(tmp_path):
    with pytest.raises(ConfigError, match=r"oversample=1\.5 needs rows that can change ranks, and those with images"):
        run(tmp_path, oversample=1.5)


def test_an_image_at_the_end_of_a_beginning_is_shared_whole():
    tokens = [5, -1, -1, -1, 6, 9]
    others = [[5, -1, -1, -1, 7, 9], [5, -1, -1, -1, 6, 8], [5, -2, -2, -2, 6, 9]]
    found = [shareable(np.array(one)).tolist() for one in (tokens, *others)]
    common = [next(i for i, (a, b) in enumerate(zip(found[0], one, strict=True)) if a != b) for one in found[1:]]
    assert common == [1, 4, 0]


def test_a_row_with_an_image_may_end_with_any_token():
    """Token 0 is "!" to many tokenizers, and rows end with two of them."""
    for last in (0, 7):
        tokens = np.array([-5, -5, 3, last, last])
        assert shareable(tokens).tolist() == [(-5 << 32) + 3, (-5 << 32) + 3, (3 << 32) + last, (last << 32) + last]


@pytest.mark.parametrize("family", daily(tiny_images.FAMILIES, "qwen2_vl"))
def test_padded_rows_of_which_a_micro_batch_may_show_no_image_are_a_sentence_before_step_0(family, tmp_path):
    mixed = dict(data=rows([[image(1)], [], [image(2)], []]), num_generations=2, per_device_train_batch_size=2)
    with pytest.raises(DataError, match="2 of 4 rows without an image, and rows are padded"):
        run(tmp_path, family=family, packing=False, **mixed)
    run(tmp_path, family=family, packing=False, **mixed | {"data": rows([[]] * 4)})
