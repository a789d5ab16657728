"""A series that is always 0 is not logged; one that was not once goes on."""

from trl_ext.trainers.grpo.rewards import RuleShares


def kept(shares, mode="train", **values):
    metrics = {name.replace("__", "/"): value for name, value in values.items()}
    shares.drop_zeros(metrics, mode)
    return set(metrics)


def test_zeros_are_left_out_until_they_are_none():
    shares = RuleShares()
    steps = [[0.0, 0.0], [0.0, 0.25], [0.0, 0.0]]
    found = [kept(shares, rules__a__error_frac=step, rules__b__error_frac=[0.0, 0.0]) for step in steps]
    assert found == [set(), {"rules/a/error_frac"}, {"rules/a/error_frac"}]


def test_other_series_stay_whatever_they_are():
    names = {"rewards/a/std", "rules/a/p95_ms", "packing/x_frac", "clip_frac", "reward"}
    assert kept(RuleShares(), **{name: [0.0] for name in names}) == names


def test_evaluation_and_training_begin_apart_and_a_resumed_run_goes_on_with_what_it_has_begun():
    shares = RuleShares()
    assert kept(shares, rules__workers_restarted=[1.0]) == {"rules/workers_restarted"}
    assert kept(shares, "eval", rules__workers_restarted=[0.0]) == set()
    shares = RuleShares()
    shares.resume([{"rules/a/none_frac": 0.5, "step": 1}, {"eval_rules/b/none_frac": 0.1}, {"reward": 1.0}])
    assert kept(shares, rules__a__none_frac=[0.0], rules__b__none_frac=[0.0]) == {"rules/a/none_frac"}
    assert kept(shares, "eval", rules__a__none_frac=[0.0], rules__b__none_frac=[0.0]) == {"rules/b/none_frac"}
