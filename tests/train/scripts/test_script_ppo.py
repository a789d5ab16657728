"""`trl_ext.scripts.ppo` trains from a recipe, and refuses what cannot work before it loads anything."""

import pytest
from peft import LoraConfig, get_peft_model

from tests import recipes, tiny
from tests.ppo_trainers import classifier
from tests.recipes import RULES
from trl_ext.monitor.log_keys import PPO
from trl_ext.monitor.record import read_log_history, read_record
from trl_ext.monitor.summary import summarize
from trl_ext.scripts import ppo

LORA = ["--use_peft", "--lora_r", "4", "--lora_target_modules", "all-linear"]
EVALUATED = dict(eval_strategy="steps", eval_steps=4, eval_on_start=True)


def reward_lora(rank, **changes):
    lora = LoraConfig(r=rank, target_modules="all-linear", task_type="SEQ_CLS", init_lora_weights=False)
    return get_peft_model(classifier(**changes), lora)


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    """A tiny policy, a reward model and LoRA reward models of it, some unfit ones, and a folder of rows.

    Unfit are an adapter of a smaller backbone, and value models of other tokens and of NaN.
    """
    folder = tmp_path_factory.mktemp("assets")
    recipes.save(folder / "model")
    recipes.save(folder / "judge", classifier())
    for name, rank, changes in (("adapter", 2, {}), ("wide", 16, {}), ("small", 2, dict(hidden_size=32))):
        reward_lora(rank, **changes).save_pretrained(folder / name)
    classifier(vocab_size=77).save_pretrained(folder / "foreign")
    broken = classifier()
    broken.score.weight.data[:] = float("nan")
    broken.save_pretrained(folder / "broken")
    rows = [{"prompt": tiny.words(i, *range(3, 3 + i % 4)), "answer": tiny.words(i)} for i in range(3, 19)]
    recipes.write_rows(folder / "data", rows)
    return folder


@pytest.fixture
def run(assets, tmp_path):
    settings = dict(total_episodes=16, num_mini_batches=2, num_ppo_epochs=1, response_length=6)
    settings |= dict(num_generations_eval=1, gradient_checkpointing=False)
    return recipes.starter(ppo.main, tmp_path, assets, rules=RULES, **settings)


def files(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_lora_recipe_trains_evaluates_saves_and_reports(run, assets, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("TRL_EXT_REPORT", "1")
    judge = ["--reward_model", str(assets / "judge")]
    table = dict(log_completions=True, num_completions_to_print=0)
    run(*LORA, *judge, learning_rate=0.01, **table, **EVALUATED)
    captured = capfd.readouterr()
    written = files(tmp_path / "out")
    assert {"adapter_model.safetensors", "critic/adapter_model.safetensors", "critic/critic.json"} <= written
    assert {"trainer_state.json", "report.html", "recipe.yaml", "rules.yaml", "versions.json"} <= written

    summary = summarize(read_log_history(tmp_path / "out"))
    assert summary.kind is PPO and summary.num_steps == 4  # two updates of two optimizer steps
    training, held_out = (
        {curve.name: c for curve, c in part.items()} for part in (summary.training, summary.held_out)
    )
    scores = {"score", "answer", "length", "rules", "judge"}
    names = ["KL", "value loss", "explained variance", "KL coefficient"]
    assert (set(list(training)[:5]), list(training)[5:]) == (scores, names)
    assert (set(list(held_out)[:5]), list(held_out)[5:]) == (scores, names[:3])
    assert None not in (held_out["length"].before, held_out["length"].after)
    assert summary.forwarded_tokens < summary.padded_tokens
    assert {"generate", "score", "logps", "update"} <= set(summary.phase_s)

    progress = captured.err
    assert "held-out after step 0  score " in progress
    assert "step 1/4  score " in progress and "KL " in progress and "explained variance " in progress
    assert "step 2/4  value loss " in progress and "{'loss'" not in captured.out + captured.err
    assert "4 steps in" in captured.out
    record = read_record(tmp_path / "out")
    assert record.trainer == "ppo" and [rule["rule"] for rule in record.rules["rules"]] == ["answer", "length"]
    assert record.recipe["lora_r"] == 4
    html = (tmp_path / "out" / "report.html").read_text()
    assert "<h3>Best</h3>" in html and "Column answer</span>" in html
    assert "Held-out prompts" in html and "<td>judge</td>" in html


def test_a_run_is_repeated_from_its_folder(run, assets, tmp_path):
    run(*LORA, "--reward_adapter", str(assets / "adapter"), total_episodes=4)
    ppo.main(["--config", str(tmp_path / "out" / "recipe.yaml"), "--output_dir", str(tmp_path / "again")])
    losses = [read_log_history(tmp_path / name)[0]["loss/policy_avg"] for name in ("out", "again")]
    assert losses[0] == losses[1] != 0
    assert "| scored by | answer (weight 1), length (weight 0.1); " in (tmp_path / "out" / "README.md").read_text()


def test_reward_model_value_model_and_reference_come_by_their_paths(run, assets, tmp_path):
    judge, model = str(assets / "judge"), str(assets / "model")
    run(reward_model=[judge], value_model=judge, ref_model=model, score_mode="gate")
    log = read_log_history(tmp_path / "out")
    assert {"rewards/answer/mean", "rewards/judge/mean"} <= set(log[0])
    recipe = read_record(tmp_path / "out").recipe
    assert (recipe["value_model"], recipe["reward_model"], recipe["score_mode"]) == (judge, [judge], "gate")
    assert {"model.safetensors", "critic/model.safetensors"} <= files(tmp_path / "out")


def test_the_old_names_of_the_models_are_understood(run, assets, tmp_path):
    old = ["--sft_model_path", str(assets / "model"), "--reward_model_path", str(assets / "judge")]
    run(*old, rules=None)
    record = read_record(tmp_path / "out")
    assert (record.recipe["sft_model_path"], record.recipe["reward_model_path"]) == (old[1], old[3])
    assert record.rules is None and "rewards/judge/mean" in read_log_history(tmp_path / "out")[0]


SLIPS = [
    ([], {"rules": None}, "There is nothing to score completions with. Give `rules`"),
    *(
        (["--" + name, "./nowhere"], {}, f"There is no folder ./nowhere. Check --{name}.")
        for name in ("reward_model", "value_model", "ref_model")
    ),
    (
        ["--reward_model_path", "x" * 5000],
        {},
        "reward_model has 5,000 characters: no folder or model has such a name.",
    ),
    (["--reward_adapter", "nowhere"], {}, "There is no folder nowhere. Check --reward_adapter."),
    (["--sft_model_path", "other"], {}, "sft_model_path (other) and model_name_or_path ("),
    (["--dataset_num_proc", "2"], {}, "dataset_num_proc=2 has no effect: prompts are tokenized as they are"),
    (["--critic", "adapter"], {}, "critic='adapter' is a second LoRA next to the actor's, but the actor has none."),
    (["--score_mode", "gate"], {}, "score_mode='gate' needs both"),
    (["--reward_adapter", "."], {}, "reward_adapter is a third LoRA after the LoRAs of actor and critic"),
    (["--critic_warmup_steps", "9"], {}, "critic_warmup_steps=9 leaves the actor no step of the run's 4"),
    (["--critic_init", "reward"], {}, "critic='head' from the reward_model, and there is none"),
    ([], {"reward_model": "judge"}, "'reward_model' must be a list, not judge. Write [judge]."),
]
UNFIT = [
    ([*LORA, "--reward_adapter", "small"], "has hidden size 32, the policy 64. Train it on the policy's base model."),
    (["--critic", "separate", "--value_model", "foreign"], "has 77 tokens, the actor "),
    (["--critic", "separate", "--value_model", "broken"], "The norm of the critic's gradient is nan in step 1"),
]


def test_a_slip_is_one_sentence_before_anything_is_loaded(subtests, run, capsys, monkeypatch):
    monkeypatch.setattr("datasets.load_dataset", lambda *args, **kwargs: pytest.fail("read the dataset"))
    for argv, changes, sentence in SLIPS:
        with subtests.test(sentence):
            assert sentence in recipes.stopped(capsys, run, *argv, **changes)


def test_models_that_do_not_fit_cost_one_sentence(subtests, run, assets, capsys):
    for argv, sentence in UNFIT:
        with subtests.test(sentence):
            assert sentence in recipes.stopped(capsys, run, *argv[:-1], str(assets / argv[-1]))


def test_reward_adapters_of_any_rank_are_further_lora(run, assets, tmp_path):
    given = [str(assets / name) for name in ("adapter", "wide")]
    run(*LORA, rules=None, reward_adapter=given, critic_init="reward")
    record = read_record(tmp_path / "out")
    assert record.recipe["reward_adapter"] == given and record.rules is None
    names = {key.split("/")[1] for key in read_log_history(tmp_path / "out")[0] if key.startswith("rewards/")}
    assert names == {"adapter", "wide"}


def test_help_explains_the_keys_that_most_runs_set(capsys):
    with pytest.raises(SystemExit) as stop:
        ppo.main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: python -m trl_ext.scripts.ppo [--config RECIPE.yaml]")
    assert "--value_model VALUE_MODEL" in text
