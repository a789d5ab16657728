"""Several accepted golds in a cell: each is right, and what cannot be read beside one that can takes nothing away."""

from trl_ext.rewards import Answer, Math, Row, Verdict
from trl_ext.rewards.text.golds import best, golds_of


def verdict(rule, text, gold):
    return rule.score(Row(None, text, None, {"answer": gold}))


def test_entries_and_cells_without_an_answer_are_left_out():
    assert golds_of(["NYC", "New York", "NYC", None, float("nan"), "  ", True]) == ["NYC", "New York"]
    assert [golds_of(cell) for cell in (None, float("nan"), [], [None], {"a": "4"}, True, [["4"]])] == [None] * 7


def test_each_accepted_text_is_right_and_no_other():
    aliases = ["New York City", "NYC", "New York"]
    for name in ("NYC", "New York", "new york city"):
        assert verdict(Answer(kind="exact"), f"The answer is {name}.", aliases).value == 1.0
    found = verdict(Answer(kind="exact"), "The answer is York.", aliases[:2])
    assert (found.value, found.status) == (0.0, "ok")


def test_each_of_several_golds_is_right_and_two_answers_are_a_conflict():
    for rule in (Answer(), Math()):
        assert [verdict(rule, f"\\boxed{{{n}}}", [18, "20"]).value for n in (18, 20, 19)] == [1.0, 1.0, 0.0]
    assert verdict(Math(), r"\boxed{18} or \boxed{20}", ["18", "20"]).status == "conflict"


def test_a_gold_that_cannot_be_read_counts_only_alone():
    assert verdict(Answer(), "A: 18", ["eighteen apples", "18"]).value == 1.0
    assert verdict(Answer(), "A: 17", ["eighteen apples", "18"]).value == 0.0
    assert verdict(Answer(), "A: 17", ["eighteen apples", "many"]).status == "gold_invalid"


def test_equal_answers_of_rows_with_other_golds_share_no_verdict():
    rows = [Row(None, r"\boxed{18}", None, {"answer": golds}) for golds in (["18"], ["18", "20"], ["20"])]
    assert len({Math().cache_key(row) for row in rows}) == 3


def test_the_ideal_completion_states_the_first_gold():
    columns = {"answer": ["18", "20"]}
    assert verdict(Math(), Math().ideal(columns), columns["answer"]).value == 1.0
    assert "18" in Answer().ideal(columns)


def test_no_value_only_where_a_gold_may_still_be_met():
    wrong, open_ = Verdict(0.0), Verdict(None, "undecided")
    assert best([wrong, open_]) is open_
    assert best([open_, wrong, Verdict(1.0)]).value == 1.0
    assert best([Verdict(None, "gold_invalid"), wrong]) is wrong
