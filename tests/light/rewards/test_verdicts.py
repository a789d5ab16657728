"""Each line of `verdicts.jsonl` is judged as it is written there; `tests/verdicts.py` explains and writes the file."""

from collections import defaultdict

import pytest

from tests.verdicts import Line, is_here, judged, read_lines

LINES: defaultdict[str, list[Line]] = defaultdict(list)
for line in read_lines():
    LINES[line["why"].partition(":")[0]].append(line)


@pytest.mark.parametrize("why", LINES)
def test_each_text_gets_its_verdict_for_each_gold(why):
    here = [line for line in LINES[why] if is_here(line)]
    wrong = [(line, found) for line in here if (found := judged(line)) != [line]]
    assert wrong == []
    if len(here) < len(LINES[why]):
        pytest.skip(f"{len(LINES[why]) - len(here)} lines of data sets that are not here: set TRL_EXT_DATA")


def test_the_file_holds_thousands_of_lines_each_once():
    lines = [str(line) for group in LINES.values() for line in group]
    assert len(lines) == len(set(lines)) >= 8_000


def test_no_hedge_and_no_denial_is_paid():
    for lines in LINES.values():
        assert [line for line in lines if line["why"].endswith((": hedges", ": denials")) and "paid" in line] == []


def test_no_join_of_candidates_earns_more_than_one_of_them():
    joins = LINES["No join of candidates earns more than one of them"]
    assert len(joins) > 100 and [line for line in joins if len(line.get("paid", ())) > 1] == []
