"""What cannot work among the settings of a run, through every door that takes settings: one sentence."""

import json
import re
from argparse import Namespace

import pytest

import trl_ext
from tests import tiny
from trl_ext.cli.before_launch import check_before_launch
from trl_ext.cli.check.recipe import make_parser
from trl_ext.cli.check.steps import run_checks
from trl_ext.errors import ConfigError
from trl_ext.trainers.ppo.refusals import OF_PPO
from trl_ext.trainers.settings.values import RUN

AHEAD = dict(generation_ahead=1, use_vllm=True, vllm_mode="server")
GROUPS = dict(advantage_estimator="rloo", num_generations=4)
# For each row of the tables, in their order, settings of which it is the first that holds.
OF_A_RUN = [
    dict(sequence_parallel=2, packing=False),
    dict(max_tokens_per_forward=4096, packing=False),
    dict(generation_ahead=2),
    dict(generation_ahead=1),
    dict(max_tokens_per_forward=1),
    dict(layer_kernels=True, packing=False),
    dict(use_liger_kernel=True, layer_kernels=False),
    dict(use_liger_kernel=True, liger_kernel_config={"cross_entropy": True}),
    dict(global_batch=64),
    dict(memory_prompt_length=64),
    dict(AHEAD, vllm_importance_sampling_correction=False),
    dict(use_transformers_continuous_batching=True, repetition_penalty=1.2),
    dict(use_transformers_continuous_batching=True, generation_kwargs={"min_new_tokens": 6}),
    dict(max_tokens_per_forward=256, max_completion_length=256),
    dict(oversample=2.0, scale_rewards="batch"),
    dict(oversample=2.0, multi_objective_aggregation="normalize_then_sum"),
    dict(sync_ref_model=True),
    dict(load_best_model_at_end=True),
]
OF_A_PPO_RUN = [
    dict(critic="none"),
    dict(advantage_estimator="rloo"),
    dict(kl_term="loss"),
    dict(stop_token="eos", stop_token_id=3),
    dict(GROUPS, loss_type="vespo", importance_sampling_level="sequence"),
    dict(importance_sampling_level="sequence"),
    dict(loss_type="luspo"),
    dict(loss_type="cispo"),
    dict(delta=1.2),
]
# A number and a word of each kind; the tables of both are tests/light/trainers/test_setting_checks.py's.
VALUES = [
    *(("grpo", settings) for settings in (dict(num_generations=0), dict(loss_type="grop"), dict(top_k=-5))),
    *(("ppo", settings) for settings in (dict(lam=1.5), dict(critic="shared"), dict(total_episodes=0))),
    *(("reward", settings) for settings in (dict(max_length=0), dict(adam_beta2=1.5))),
    *(("reward", settings) for settings in (dict(memory_on_oom="pray"), dict(per_device_train_batch_size=0))),
    *(("grpo", settings) for settings in (dict(scale_rewards="grup"), dict(eval_temperature=-1.0))),
]
CASES = [("grpo", settings, row[1]) for row, settings in zip(RUN, OF_A_RUN, strict=True)]
# Pairs have the settings that are about packing, too.
CASES += [("reward", *case) for _, *case in CASES if "packing" in case[0]]
CASES += [("ppo", settings, row[1]) for row, settings in zip(OF_PPO, OF_A_PPO_RUN, strict=True)]
CASES += [(trainer, settings, "") for trainer, settings in VALUES]
KINDS = {"grpo": "GRPO", "ppo": "PPO", "reward": "Reward"}


def config(trainer, folder, **settings):
    return getattr(trl_ext, f"{KINDS[trainer]}Config")(str(folder), **tiny.QUIET_ON_CPU, **settings)


def by_config(trainer, settings, folder):
    config(trainer, folder, **settings)


def by_trainer(trainer, settings, folder):
    """Settings that were made to contradict each other after the config was made; no model is loaded."""
    args = config(trainer, folder)
    for name, value in settings.items():
        setattr(args, name, value)
    kind = getattr(trl_ext, f"{KINDS[trainer]}Trainer")
    kind(args=args, model="no-model-is-loaded", **({} if trainer == "reward" else {"reward_funcs": len}))


def recipe(trainer, settings, folder):
    rows = folder / "rows.jsonl"
    rows.write_text('{"prompt": "1 + 1 =", "chosen": "2", "rejected": "3"}\n')
    keys = dict(model_name_or_path="no-model-is-loaded", dataset_name=str(rows), output_dir=str(folder / "out"))
    keys |= {**tiny.QUIET_ON_CPU, **settings}
    file = folder / "recipe.yaml"
    file.write_text(json.dumps(keys))  # JSON is YAML
    return str(file)


def by_script(trainer, settings, folder):
    make_parser(trainer).parse(["--config", recipe(trainer, settings, folder)])


def by_check(trainer, settings, folder):
    words = Namespace(recipe=recipe(trainer, settings, folder), trainer=trainer, gpus="1xA40", gpu_memory_gib=None)
    vars(words).update(config_file=None, vllm_servers=None, num_processes=1, max_prompt_length=None)
    raise ConfigError(run_checks(words, [])[-1].what)


def by_launch(trainer, settings, folder):
    words = ["--config", recipe(trainer, settings, folder)]
    check_before_launch(f"trl_ext.scripts.{trainer}", make_parser(trainer), words)


@pytest.mark.parametrize("door", [by_config, by_trainer, by_script, by_check, by_launch])
def test_what_cannot_work_is_one_sentence_with_its_values_and_what_to_do(door, subtests, tmp_path, monkeypatch):
    monkeypatch.setattr("trl_ext.scripts.training.check_model", lambda keys: None)  # of the launch; no model is here
    monkeypatch.setattr("trl_ext.trainers.settings.checks.check_processes", lambda args: None)  # one for two
    for trainer, settings, ending in CASES:
        with subtests.test(trainer=trainer, **settings):
            with pytest.raises(ConfigError) as raised:
                door(trainer, settings, tmp_path)
            told = str(raised.value)
            assert told.endswith(ending) and any(f"{name}={value!r}" in told for name, value in settings.items())
            assert ending or re.search(r" must be .*at least|is unknown\. Use one of: ", told)
