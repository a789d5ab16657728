"""Rule sets called as verl and OpenRLHF call their reward functions; the callers do what those projects do.

verl 0.10.0.dev: run_single of verl/experimental/reward_loop/reward_manager/naive.py, get_custom_reward_fn of
verl/trainer/ppo/reward.py, verify of verl/workers/reward_manager/batch.py. OpenRLHF 0.11.0: SingleTurnAgentExecutor of
openrlhf/utils/agent.py.
"""

import asyncio
import importlib.util
import inspect
import pickle
from functools import partial

import pytest

from trl_ext import RuleSet
from trl_ext.errors import DataError, RuleError
from trl_ext.rewards import Answer, Length

MODULE = """
from trl_ext import RuleSet

rules = RuleSet.from_yaml("{rules}")
compute_score = rules.for_verl()
reward_func = rules.for_openrlhf()
"""


@pytest.fixture
def rules() -> RuleSet:
    return RuleSet([Answer(), Length(high=3, unit="words", weight=0.1, gate="answer")])


@pytest.fixture
def module(tmp_path):
    """A user's file, loaded by its path as both projects load it."""
    (tmp_path / "rules.yaml").write_text("rules: [{rule: answer}]\n")
    path = tmp_path / "my_reward.py"
    path.write_text(MODULE.format(rules=tmp_path / "rules.yaml"))
    spec = importlib.util.spec_from_file_location("my_reward", path)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def as_verl_calls(compute_score, response, gold, extra_info=None, reward_kwargs=None):
    """One completion, in a thread, with the keywords of the naive manager; returns reward and what verl logs."""
    raw = partial(lambda f, extra, *args, **kw: f(*args, **{**kw, **extra}), compute_score, reward_kwargs or {})
    assert not inspect.iscoroutinefunction(raw)

    async def run_single():
        return await asyncio.get_running_loop().run_in_executor(
            None,
            lambda: raw(
                data_source="openai/gsm8k", solution_str=response, ground_truth=gold, extra_info=extra_info or {}
            ),
        )

    result = asyncio.run(run_single())
    return result["score"], result


def test_verl_gets_a_score_and_the_values_of_the_rules(rules):
    score, logged = as_verl_calls(rules.for_verl(), "A: 18", "18")
    assert score == pytest.approx(1.1)
    assert logged == {"score": score, "unscored": 0.0, "rules/answer": 1.0, "rules/length": 1.0}
    score, logged = as_verl_calls(rules.for_verl(), "A: 18", "unreadable")
    assert (score, logged["unscored"]) == (0.0, 1.0), "what cannot be judged counts as nothing, and shows"


def test_verl_finds_the_function_in_a_file_and_ray_can_pickle_it(module):
    assert as_verl_calls(pickle.loads(pickle.dumps(module.compute_score)), "A: 18", "18")[0] == 1.0


def test_every_score_of_verl_has_the_same_keys_and_numbers(rules):
    results = [as_verl_calls(rules.for_verl(), "A: 18", gold)[1] for gold in ("18", "17", "unreadable")]
    assert len({tuple(one) for one in results}) == 1
    assert all(type(value) is float for one in results for value in one.values())


def test_extra_info_of_verl_holds_prompt_and_columns():
    compute_score = RuleSet([Answer("number")]).for_verl()
    info = {"prompt": "9 * 2 =", "number": 18, "index": 0, "num_turns": None, "rollout_reward_scores": {}}
    assert as_verl_calls(compute_score, "A: 18", "unused", info)[0] == 1.0
    assert as_verl_calls(compute_score, "A: 18", {"number": "17"})[0] == 0.0


def test_what_verl_passes_with_a_reward_model_is_taken_and_what_means_nothing_refused(rules):
    router = {"reward_router_address": "127.0.0.1:80", "reward_model_tokenizer": None}
    assert as_verl_calls(rules.for_verl(), "A: 17", "18", reward_kwargs=router)[0] == 0.0
    with pytest.raises(TypeError, match="stricter"):
        as_verl_calls(rules.for_verl(), "A: 17", "18", reward_kwargs={"stricter": True})


def test_the_batch_manager_of_verl_gets_a_list(rules):
    scores = rules.for_verl()(
        data_sources=["gsm8k"] * 2,
        solution_strs=["A: 18", "A: 17"],
        ground_truths=["18", "18"],
        extra_infos=[{"prompt": "9 * 2 =", "rollout_reward_scores": {}}] * 2,
    )
    assert [one["score"] for one in scores] == pytest.approx([1.1, 0.0])


def as_openrlhf_calls(reward_func, query, prompt, label):
    """One completion, in a thread, as `_fetch_rewards_via_func` does; returns reward, score and logs."""

    async def fetch():
        return await asyncio.gather(asyncio.to_thread(reward_func, [query], [prompt], [label]))

    info = asyncio.run(fetch())[0]
    score = info.get("scores")
    return info["rewards"], info["rewards"] if score is None else score, info.get("extra_logs") or {}


PROMPT = "<|im_start|>user\nA: 17 is wrong. 9 * 2 =<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("end", ["", "<|im_end|>", "<|im_end|>\n<|endoftext|><|endoftext|>", "</s>"])
def test_openrlhf_gets_reward_score_and_logs(rules, end):
    reward, score, logs = as_openrlhf_calls(rules.for_openrlhf(), f"<s>{PROMPT}A: 18{end}", PROMPT, "18")
    assert [float(value[0]) for value in (reward, score)] == pytest.approx([1.1, 1.0])
    logged = {name: float(value[0]) for name, value in logs.items()}
    assert logged == {"unscored": 0.0, "rules/answer": 1.0, "rules/length": 1.0}


def test_openrlhf_finds_the_function_in_a_file(module):
    assert float(as_openrlhf_calls(module.reward_func, f"{PROMPT}A: 18", PROMPT, "18")[0][0]) == 1.0


def test_the_prompt_is_no_answer_of_the_model_and_must_stand_in_the_query(rules):
    assert float(as_openrlhf_calls(rules.for_openrlhf(), PROMPT, PROMPT, "17")[0][0]) == 0.0
    with pytest.raises(DataError, match="does not hold its prompt"):
        as_openrlhf_calls(rules.for_openrlhf(), "9 * 2 = A: 18", PROMPT, "18")


def test_rules_of_several_columns_read_labels_of_json():
    reward_func = RuleSet([Answer(), Answer("unit", kind="exact", name="unit")]).for_openrlhf()
    reward, *_ = as_openrlhf_calls(reward_func, "p<answer>18</answer>", "p", '{"answer": "18", "unit": "eggs"}')
    assert float(reward[0]) == 1.0
    with pytest.raises(DataError, match="JSON objects"):
        as_openrlhf_calls(reward_func, "pA: 18", "p", "18")


def test_a_set_that_must_know_the_progress_is_refused():
    scheduled = RuleSet([Answer(schedule=[[0, 1], [1, 0]])])
    for make in (scheduled.for_verl, scheduled.for_openrlhf, RuleSet([Answer()], normalise=True).for_verl):
        with pytest.raises(RuleError, match=r"verl|OpenRLHF"):
            make()
