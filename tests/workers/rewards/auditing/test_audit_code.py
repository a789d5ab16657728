"""audit of Code: tests that cannot be run, that test nothing, and solutions that do not pass."""

import json

import pytest

from trl_ext.errors import DataError
from trl_ext.rewards import Code, RuleSet
from trl_ext.rewards.auditing.audit import audit

SQUARE = json.dumps([{"input": "4", "output": "16"}, {"input": "3", "output": "9"}])
DOUBLE = json.dumps([{"input": "4", "output": "8"}])
PRINTS_SQUARE, PRINTS_DOUBLE = "print(int(input()) ** 2)", "print(int(input()) * 2)"


def audited(rows, **fields):
    report = audit(RuleSet([Code(**fields)]), rows)
    return report, report.rules[0]


def test_a_solution_must_pass_its_tests_and_no_others():
    rows = [{"tests": SQUARE, "solution": PRINTS_SQUARE}, {"tests": DOUBLE, "solution": [PRINTS_DOUBLE, "0"]}]
    report, found = audited(rows, solution="solution")
    assert report.ok and (found.num_right, found.num_compared, found.num_accepted) == (2, 2, 0)


def test_a_solution_that_fails_and_one_that_passes_the_tests_of_others_are_shown():
    two = json.dumps([{"input": "2", "output": "4"}])
    solutions = [(SQUARE, "print(0)"), (two, PRINTS_DOUBLE), (SQUARE, PRINTS_SQUARE)]
    report, found = audited([{"tests": cell, "solution": text} for cell, text in solutions], solution="solution")
    assert [(failure.kind, failure.row, failure.other) for failure in found.failures] == [
        ("wrong", 0, None),
        ("accepted", 0, 2),
        ("accepted", 1, 2),
    ]
    assert "row 0: its gold earns 0 against itself (ok: 0 of 2 tests pass; test 1: wrong output)" in str(report)


def test_without_solutions_tests_must_be_read_and_run_and_must_fail_an_empty_program():
    tests = [SQUARE, "no tests", json.dumps([{"input": "", "output": ""}])]
    report, found = audited([{"tests": cell} for cell in tests])
    assert (found.num_unreadable, found.num_blank, found.num_not_asked, found.lost_rows) == (1, 1, 2, (1,))
    assert not report.ok and "row 2: a completion that does nothing earns 1" in str(report)
    assert "code, 2 rows name no right completion" in str(report)
    assert audited([{"tests": SQUARE}])[0].ok


def test_asserts_that_need_a_missing_module_or_test_nothing_are_shown():
    tests = ["import surely_not_installed\nassert f(2) == 4", "assert True", "assert f(2) == 4"]
    _, found = audited([{"tests": cell} for cell in tests], mode="asserts")
    assert [(failure.kind, failure.row) for failure in found.failures] == [("unreadable", 0), ("blank", 1)]


def test_a_solution_with_a_fence_in_it_stays_one_program():
    rows = [{"tests": SQUARE, "solution": f"'''\n```\n'''\n{PRINTS_SQUARE}"}]
    assert audited(rows, solution="solution")[0].ok


def test_the_column_of_solutions_is_asked_for_by_the_audit_alone():
    rules = RuleSet([Code(solution="solution")])
    with pytest.raises(DataError, match="lacks the column 'solution', which a rule names for its audit"):
        audit(rules, [{"tests": SQUARE}])
    assert rules(completions=[f"```python\n{PRINTS_SQUARE}\n```"], tests=[SQUARE]) == [1.0]


@pytest.mark.parametrize("cell", [None, "", "[]", 3, [None], [" "]])
def test_a_row_without_a_solution_is_not_asked(cell):
    assert Code(solution="solution").ideal({"solution": cell}) is None
    assert Code().ideal({"solution": "x"}) is None
