"""Group mates side by side: fewer tokens, the same rows in every optimizer step."""

import pytest
import torch

from tests import tiny
from tests.rollouts import rollout
from tests.train.trainers.grpo.test_grpo_step import prompts, reward
from trl_ext import GRPOConfig, GRPOTrainer
from trl_ext.trainers.forward.group_order import regroup, split_is_free

torch.set_num_threads(1)


def micro_batches() -> list[dict]:
    """Four micro-batches of two rows; prompts 7 and 8 shuffled; `row` says which row it was."""
    prompt = [7, 8, 8, 7, 8, 7, 7, 8]
    rows = torch.arange(8)
    ids = torch.tensor(prompt)[:, None]
    return [
        {
            "prompt_ids": ids[k : k + 2],
            "row": rows[k : k + 2],
            "names": [f"r{k}", f"r{k + 1}"],
            "n": torch.tensor(9),
            "x": None,
        }
        for k in range(0, 8, 2)
    ]


def test_mates_stand_together_within_an_optimizer_step():
    after = regroup(micro_batches(), per_step=4)
    assert [b["prompt_ids"].flatten().tolist() for b in after] == [[7, 7], [7, 7], [8, 8], [8, 8]]


def test_every_row_stays_in_its_optimizer_step():
    after = regroup(micro_batches(), per_step=2)
    assert sorted(r for b in after[:2] for r in b["row"].tolist()) == [0, 1, 2, 3]
    assert sorted(r for b in after[2:] for r in b["row"].tolist()) == [4, 5, 6, 7]


def test_all_values_of_a_row_move_together():
    for batch in regroup(micro_batches(), per_step=4):
        assert batch["names"] == [f"r{r}" for r in batch["row"].tolist()]
        assert batch["n"] == 9
        assert batch["x"] is None


@pytest.mark.parametrize(
    ("loss_type", "free"),
    [
        ("dapo", True),
        ("grpo", True),
        ("dr_grpo", True),
        ("cispo", True),
        ("vespo", True),
        ("luspo", True),
        ("bnpo", False),
    ],
)
def test_a_loss_that_depends_on_the_split_keeps_trls(loss_type, free, tmp_path):
    args = GRPOConfig(str(tmp_path), loss_type=loss_type, use_cpu=True, bf16=False)
    assert split_is_free(args, has_entropy_bonus=False, has_aux_loss=False) is free
    assert not split_is_free(args, has_entropy_bonus=True, has_aux_loss=False)
    assert not split_is_free(args, has_entropy_bonus=False, has_aux_loss=True)


def train(tmp_path, **changes) -> list[dict]:
    args = GRPOConfig(
        **{
            **dict(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", disable_tqdm=True),
            **dict(max_steps=2, per_device_train_batch_size=4, gradient_accumulation_steps=4, num_generations=4),
            **dict(max_completion_length=12, logging_steps=1, save_strategy="no"),
            **changes,
        }
    )
    trainer = GRPOTrainer(
        tiny.model("llama"),
        reward,
        args,
        prompts(),
        eval_dataset=prompts(),
        processing_class=tiny.tokenizer(),
        rollout_func=rollout,
    )
    trainer.train()
    return trainer.state.log_history


def test_metrics_tell_how_many_tokens_packing_saved(tmp_path):
    first = train(tmp_path)[0]
    assert first["packing/forwarded_over_raw"] < 1 < first["packing/padded_over_forwarded"]
    assert first["packing/padded_tokens"] > first["packing/forwarded_tokens"]


def test_without_packing_the_metrics_say_so(tmp_path):
    first = train(tmp_path, packing=False)[0]
    assert first["packing/forwarded_over_raw"] > 1
    assert first["packing/padded_over_forwarded"] == 1


def test_regrouping_saves_prompts(tmp_path):
    apart = train(tmp_path, loss_type="bnpo")[0]["packing/forwarded_tokens"]
    together = train(tmp_path, loss_type="dapo")[0]["packing/forwarded_tokens"]
    assert together < apart


def test_the_seconds_of_a_step_are_logged_by_phase(tmp_path):
    history = train(tmp_path, eval_on_start=True, per_device_eval_batch_size=4)
    first = next(entry for entry in history if "loss" in entry)
    assert {"phase/generate_s", "phase/score_s", "phase/update_s", "phase/other_s", "phase/evaluate_s"} <= set(first)


def test_evaluation_decodes_greedily_when_asked_and_training_samples_again(tmp_path):
    args = GRPOConfig(
        str(tmp_path),
        use_cpu=True,
        bf16=False,
        report_to="none",
        max_completion_length=6,
        eval_temperature=0.0,
        num_generations_eval=1,
    )
    trainer = GRPOTrainer(
        tiny.model("llama"), reward, args, prompts(), eval_dataset=prompts(), processing_class=tiny.tokenizer()
    )
    asked = [tiny.words(5, 6, 7)] * 4
    trainer.model.eval()
    greedy = {tuple(ids) for ids in trainer._generate(asked)[1]}
    trainer.model.train()
    sampled = {tuple(ids) for ids in trainer._generate(asked)[1]}
    assert len(greedy) == 1
    assert len(sampled) > 1
