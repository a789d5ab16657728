"""`trl_ext.AsyncGRPOTrainer` trains on a processor as TRL's would on a card, with the files of all our trainers."""

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import yaml
from transformers import TrainerCallback
from trl.experimental import async_grpo
from trl.experimental.async_grpo import async_grpo_trainer as trls

import trl_ext
from tests import async_rollouts, tiny, trained
from tests.async_rollouts import Server, trainer
from tests.grpo_trainers import weights
from tests.nightly import nightly
from trl_ext.compat import trl as compat_trl
from trl_ext.compat.torch import cpu_attention_shares_keys
from trl_ext.errors import ConfigError, SamplerError, SupportError
from trl_ext.packing import tree
from trl_ext.rewards import Length, RuleSet
from trl_ext.trainers.record.trainer import REPORT_VARIABLE

torch.set_num_threads(1)
SMALL = 3e-4  # a learning rate with which the policy is some steps from where it clips


def test_two_steps_move_the_weights_and_leave_record_and_report(tmp_path, monkeypatch):
    monkeypatch.delenv(REPORT_VARIABLE, raising=False)
    run = trainer(tmp_path)
    before = weights(run)
    run.train()
    assert (weights(run) - before).abs().max() > 1e-3
    folder = tmp_path / "run"
    assert yaml.safe_load((folder / "recipe.yaml").read_text())["learning_rate"] == 1e-2
    steps = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    steps = [step for step in steps if "loss" in step]
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert {"phase/generate_wait_s", "phase/update_s", "phase/step_s", "rewards/length/mean"} <= step.keys()
        assert step["sampling/logit_difference"] >= 0 and step["rewards/length/mean"] == step["reward"]
    assert steps[0]["sampling/logit_difference"] < 1e-5  # the weights are the sampler's
    assert "Rewards" in (folder / "report.html").read_text()


def test_an_error_in_training_is_in_the_log(tmp_path):
    class Failing(TrainerCallback):
        def on_step_end(self, *given, **kwargs):
            raise OSError("the disk is gone")

    run = trainer(tmp_path)
    run.add_callback(Failing())
    with pytest.raises(OSError, match="the disk is gone"):
        run.train()
    assert "the disk is gone" in (tmp_path / "run" / "log.jsonl").read_text()


class Gradients(TrainerCallback):
    """Keeps the gradient of the first optimizer step."""

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        self.found = gradient(model)


def gradient(model):
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


def gradient_of(run):
    """The gradient of the first optimizer step, and the rows that it is of."""
    rows, kept, take = [], Gradients(), run.rollout_worker.get
    run.rollout_worker.get = lambda timeout: rows.append(take(timeout)) or rows[-1]
    run.add_callback(kept)
    run.train()
    return kept.found, rows[: run.args.per_device_train_batch_size]


def gradient_alone(model, rows):
    """The same by one forward for each row, without TRL's trainer."""
    loss, num = 0.0, 0
    for row in rows:
        n, ids = int(row.completion_mask.sum()), torch.from_numpy(row.input_ids)
        logps = model(ids[None]).logits[0].float().log_softmax(-1)[-n - 1 : -1].gather(1, ids[-n:, None])[:, 0]
        loss = loss - (torch.exp(logps - torch.from_numpy(row.old_log_probs)[-n:]) * row.advantage).sum()
        num += n
    (loss / num).backward()
    return gradient(model)


def test_the_gradient_is_that_of_rows_alone(tmp_path):
    found, rows = gradient_of(trainer(tmp_path, max_steps=1, max_grad_norm=1e9))
    alone = gradient_alone(tiny.model("llama"), rows)
    assert (found - alone).abs().max() <= 1e-5 and found.abs().max() > 1e-3


def test_a_trained_model_in_bfloat16_is_as_near_to_float32_as_rows_alone(tmp_path):
    half = trained.model(torch.bfloat16, num_layers=6)
    server = Server(trained.model(torch.bfloat16, num_layers=6))
    run = trainer(tmp_path, model=half, server=server, dtype=torch.bfloat16, max_steps=1, max_grad_norm=1e9)
    found, rows = gradient_of(run)
    truth = gradient_alone(half.float(), rows)
    alone = gradient_alone(trained.model(torch.bfloat16, num_layers=6), rows)
    ours, theirs = (((one.float() - truth).norm() / truth.norm()).item() for one in (found, alone))
    print(f"relative error of the gradient: packed {ours:.4f}, rows alone {theirs:.4f}")  # pytest -rP shows it
    assert 0 < ours <= 1.1 * theirs < 0.2


def test_another_trainer_of_trls_does_not_take_the_attention_away(tmp_path):
    run = trainer(tmp_path)
    trls.register_tree_attention()  # as its constructor does
    run.train()
    assert run.state.global_step == 2


def test_rules_are_named_in_the_record(tmp_path):
    run = trainer(tmp_path)
    run.given_rewards = [RuleSet([Length(high=4)])]
    run.train()
    assert yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())["rules"]["rules"][0]["rule"] == "length"


# Refusals ----------------------------------------------------------------------------------------------------------


def test_rollouts_without_aiohttp_are_refused_with_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr("trl_ext.trainers.async_grpo.trainer.find_spec", lambda name: None)
    with pytest.raises(SupportError, match=r"aiohttp, which is not installed. Run: pip install aiohttp$"):
        trl_ext.AsyncGRPOTrainer(str(tmp_path), async_rollouts.spread)


def test_another_attention_of_trls_is_refused_by_name(tmp_path, monkeypatch):
    tree.register_tree_attention()
    from trl_ext.compat.transformers import register_attention

    register_attention("tree_fa9", tree.tree_attention)
    monkeypatch.setattr(trls, "TREE_ATTENTION", "tree_fa9")
    with pytest.raises(SupportError, match=r"^This TRL gives its rows the attention 'tree_fa9', and trl_ext computes"):
        trainer(tmp_path)


def test_soft_capping_is_refused_before_training(tmp_path):
    with pytest.raises(ConfigError, match="caps its attention logits"):
        trainer(tmp_path, family="gemma2")


def test_the_trainer_is_found_where_this_trl_has_it(monkeypatch):
    assert compat_trl.async_grpo_trainer() is async_grpo.AsyncGRPOTrainer
    stable = ModuleType("trl")
    stable.AsyncGRPOTrainer = int
    monkeypatch.setitem(sys.modules, "trl", stable)
    assert compat_trl.async_grpo_trainer() is int
    monkeypatch.setitem(sys.modules, "trl", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "trl.experimental.async_grpo", None)
    with pytest.raises(SupportError, match="has no AsyncGRPOTrainer"):
        compat_trl.async_grpo_trainer()


# Pushes ------------------------------------------------------------------------------------------------------------


def test_the_first_forward_of_a_process_may_be_a_checkpointed_one(tmp_path):
    cpu_attention_shares_keys.cache_clear()  # it looks at a small attention's graph, once
    run = trainer(tmp_path, dtype=torch.bfloat16, max_steps=1)
    assert run.args.gradient_checkpointing  # TRL's default
    run.train()
    assert run.state.global_step == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pushes_that_are_lost_end_the_run(dtype, tmp_path):
    server = Server(tiny.model("llama").to(dtype), loses=lambda number: number > 1)
    run = trainer(tmp_path, server=server, dtype=dtype, max_steps=40, learning_rate=SMALL)
    with pytest.raises(SamplerError, match=r"^The weights that are pushed to vLLM do not seem to arrive there"):
        run.train()
    assert run.state.global_step <= 20


@pytest.mark.parametrize(
    ("dtype", "sync"),
    [(torch.float32, 1), (torch.bfloat16, 3), nightly(torch.float32, 3), nightly(torch.bfloat16, 1)],
)
def test_pushes_that_arrive_end_no_run(dtype, sync, tmp_path):
    server = Server(tiny.model("llama").to(dtype))
    run = trainer(tmp_path, server=server, dtype=dtype, max_steps=25, weight_sync_steps=sync, learning_rate=SMALL)
    run.train()
    assert run.state.global_step == 25
