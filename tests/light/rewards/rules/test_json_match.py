"""JsonMatch: values, not spellings; paths, tolerance, order, shares, schemas within the gold; tool calls."""

import json

import pytest

from trl_ext import RuleSet
from trl_ext.errors import RuleError
from trl_ext.rewards import JsonMatch, JsonSchema, Row

GOLD = {"name": "Ada", "age": 36, "tags": ["a", "b"], "in": {"x": 1.5}}


def judged(text: str, gold: object = GOLD, **fields: object) -> tuple[float | None, str]:
    verdict = JsonMatch(**fields).score(Row(None, text, None, {"answer": gold}))
    return verdict.value, verdict.status


EQUAL = [
    (GOLD, json.dumps(GOLD, indent=2)),
    (json.dumps(GOLD), '{"in": {"x": 15e-1}, "tags": ["a", "b"], "age": 36.0, "name": "Ada"}'),
    (GOLD, f"Here it is:\n```json\n{json.dumps(GOLD)}\n```\nDone."),
    (GOLD, f"<think>{{}}</think>{json.dumps(GOLD)}"),
    *(([], "[]"), ("3", "3"), ("{}", "{}"), ([None, True, "\u00e9"], '[null, true, "\\u00e9"]')),
]
DIFFERENT = [
    *((GOLD, "{}"), (GOLD, json.dumps(GOLD | {"more": 1})), (GOLD, json.dumps(GOLD | {"tags": ["b", "a"]}))),
    *((GOLD, json.dumps(GOLD | {"age": "36"})), (GOLD, f"[{json.dumps(GOLD)}]"), (GOLD, "Ada"), (GOLD, "")),
    *((1, "true"), (True, "1"), (None, "0"), ({}, "[]"), ([], "{}"), (0, "null"), (3, '{"all": 3}'), ([1], "[1, 1]")),
    (GOLD, "[" * 90 + "]" * 90),
]


def test_values_count_and_not_their_spelling(subtests):
    for gold, text in EQUAL:
        with subtests.test(text):
            assert judged(text, gold) == (1.0, "ok")
    for gold, text in DIFFERENT:
        with subtests.test(text):
            assert judged(text, gold)[0] == 0.0


def test_order_and_tolerance_are_the_rules(subtests):
    for gold, text, fields, value in (
        ([1, [2, 3], "a"], '["a", [3, 2], 1]', {"ordered": False}, 1.0),
        *(([1, 1, 2], "[1, 2, 2]", {"ordered": False}, 0.0), ([1, 2], "[1, 2, 3]", {"ordered": False}, 0.0)),
        *((100, "101", {"tolerance": 0.02}, 1.0), (100, "103", {"tolerance": 0.02}, 0.0), (0, "0.01", {}, 0.0)),
        *((10**400, "1", {"tolerance": 0.1}, 0.0), (1, "1" + "0" * 400, {"tolerance": 0.1}, 0.0)),
        *((True, "1", {"tolerance": 0.1}, 0.0), (0.1 + 0.2, "0.3", {"tolerance": 1e-9}, 1.0), (0.3, "0.31", {}, 0.0)),
        ([1.0, 2.0], "[2.001, 0.999]", {"ordered": False, "tolerance": 0.01}, 1.0),
    ):
        with subtests.test(text, fields=fields):
            assert judged(text, gold, **fields) == (value, "ok")


def test_fields_are_paths_or_keys_and_a_share_counts_them(subtests):
    half = json.dumps({"name": "Ada", "age": 3, "tags": ["a"], "in": {"x": 1.5}})
    for text, fields, value in (
        *((half, {"partial": True}, 0.5), (half, {}, 0.0), (half, {"paths": ["name", "in.x"]}, 1.0)),
        *((half, {"paths": ["name", "age"], "partial": True}, 0.5), ("{}", {"partial": True}, 0.0)),
        (json.dumps(GOLD | {str(i): i for i in range(4)}), {"partial": True}, 0.5),
        *(('{"tags": 3}', {"paths": ["length(tags)"]}, 0.0), ('{"tags": [1, 2]}', {"paths": ["length(tags)"]}, 1.0)),
    ):
        with subtests.test(text, fields=fields):
            assert judged(text, **fields) == (value, "ok")


def test_a_schema_in_the_gold_stands_for_what_fits_it(subtests):
    gold = '{"name": {"$fits": {"type": "string", "minLength": 2}}, "age": 36}'
    for text, value in (('{"name": "Al", "age": 36}', 1.0), ('{"name": "A", "age": 36}', 0.0), ('{"age": 36}', 0.0)):
        with subtests.test(text):
            assert judged(text, gold) == (value, "ok")


def test_where_says_what_is_read(subtests):
    bare, fenced = json.dumps(GOLD), f"So:\n```json\n{json.dumps(GOLD)}\n```"
    for where, values in (("all", (1.0, 0.0)), ("last_block", (0.0, 1.0)), ("either", (1.0, 1.0))):
        with subtests.test(where):
            assert tuple(judged(text, where=where)[0] for text in (bare, fenced)) == values
            schema = JsonSchema({"required": ["name"]}, where=where)
            assert tuple(schema.score(Row(None, text, None, {})).value for text in (bare, fenced)) == values


def test_a_gold_that_cannot_be_read_has_no_value_whatever_the_completion_is(subtests):
    for gold, fields in (
        *(("{", {}), ({"a": {"$fits": {"type": "such"}}}, {}), ({1, 2}, {}), ("[" * 5000, {})),
        *((GOLD, {"paths": ["absent"]}), ({"name": "f"}, {"where": "tool_calls"}), (3, {"where": "tool_calls"})),
    ):
        for text in ("", "{}", json.dumps(GOLD)):
            with subtests.test(gold=gold, text=text):
                assert judged(text, gold, **fields) == (None, "gold_invalid")


CALLS = [{"name": "find", "arguments": {"q": "tea", "n": 2}}, {"name": "buy", "arguments": {"id": 7}}]
DEEP = '{"id":' * 400 + "1" + "}" * 400
TURNS = [
    {"role": "assistant", "tool_calls": [{"type": "function", "function": CALLS[0]}]},
    {"role": "tool", "content": "7"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "buy", "arguments": '{"id": 7}'}}]},
    {"role": "assistant", "content": "Done."},
]


def called(turns: list, gold: object = CALLS, **fields: object) -> list[float]:
    """The value, through the set that a trainer calls."""
    rules = RuleSet([JsonMatch(where="tool_calls", gold="calls", **fields)], isolate=False)
    return rules(prompts=[[{"role": "user", "content": "Buy"}]], completions=[turns], calls=[json.dumps(gold)])


def test_tool_calls_are_read_from_the_messages(subtests):
    other = [CALLS[0], {"name": "buy", "arguments": {"id": 8}}]
    fits = [CALLS[0], {"name": "buy", "arguments": {"$fits": {"type": "object", "required": ["id"]}}}]
    function = [{"type": "function", "function": {"name": "find", "arguments": '{"n": 2, "q": "tea"}'}}, CALLS[1]]
    for turns, gold, fields, value in (
        *((TURNS, CALLS, {}, 1.0), (TURNS, function, {}, 1.0), (TURNS, other, {}, 0.0), (TURNS, fits, {}, 1.0)),
        *((TURNS[:2], CALLS, {}, 0.0), (TURNS, CALLS[:1], {}, 0.0), (TURNS[3:], [], {}, 1.0), (TURNS, [], {}, 0.0)),
        *((TURNS, CALLS[::-1], {}, 0.0), (TURNS, CALLS[::-1], {"ordered": False}, 1.0)),
        *((TURNS, other, {"paths": ["[].name"]}, 1.0), (TURNS, other, {"paths": ["[1].arguments"]}, 0.0)),
        ([{"role": "assistant", "content": json.dumps(CALLS)}], CALLS, {}, 0.0),
        ([{"role": "assistant", "tool_calls": [[1], {"function": "buy"}]}], CALLS, {}, 0.0),
        ([{"role": "assistant", "tool_calls": [{"name": "buy", "arguments": DEEP}]}], fits[1:], {}, 0.0),
        ([{"role": "assistant", "tool_calls": [{"name": "buy", "arguments": json.loads(DEEP)}]}], fits[1:], {}, 1.0),
    ):
        with subtests.test(gold=gold, fields=fields):
            assert called(turns, gold, **fields) == [value]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *(({"paths": ["a["]}, "no JMESPath"), ({"paths": "a"}, "list of strings"), ({"where": "first"}, "where is")),
        *(({"tolerance": 1}, "below 1"), ({"ordered": 1}, "true or false"), ({"gold": ""}, "a dataset column")),
    ],
)
def test_fields_that_cannot_work_are_refused(fields, message):
    with pytest.raises(RuleError, match=message):
        JsonMatch(**fields)
