"""JsonSchema: strict JSON, a schema from three places, and no way out of the schema or into long work."""

import json
from functools import partial

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.processor_time import timed
from trl_ext.errors import RuleError
from trl_ext.rewards.base.rule import Row, Verdict
from trl_ext.rewards.rules.json_schema import MAX_CHARS, JsonSchema, last_block, nesting

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name"],
    "additionalProperties": False,
}


def judged(text: str, schema: object = PERSON, **fields: object) -> Verdict:
    return JsonSchema(schema, **fields).score(Row(None, text, None, {}))


def judged_by_column(text: str, schema: object) -> Verdict:
    return JsonSchema().score(Row(None, text, None, {"schema": schema}))


def test_only_json_that_fits_earns_one(subtests):
    for value, texts in {
        1.0: ('{"name": "Ada", "age": 36}', '<think>{"name": 1}</think>\n {"name": "Ada"} '),
        0.0: (
            *('{"name": "Ada", "age": 36.5}', '{"name": "Ada", "city": "London"}', "{}"),
            *('Here it is: {"name": "Ada"}', '<think>{"name": "Ada"}', ""),
        ),
    }.items():
        for text in texts:
            with subtests.test(text=text):
                assert judged(text).value == value


def test_what_python_reads_but_json_forbids_is_no_json(subtests):
    for text, reason in (
        *(('{"name": "a", "name": "b"}', "a key occurs twice"), ('{"name": NaN}', "Out of range float")),
        *(("-Infinity", "Out of range float"), ("1e999", "Out of range float")),
        *(("9" * 5000, "4300 digits"), (r'"\ud800"', "surrogates"), ("{'name': 'Ada'}", "property name")),
        *(('{"name": "a",}', "not JSON"), ("1 2", "Extra data")),
    ):
        with subtests.test(text=text):
            verdict = judged(text, {"type": ["object", "number", "string"]})
            assert (verdict.value, verdict.status) == (0.0, "ok")
            assert reason in verdict.detail


def test_the_last_closed_block_is_read(subtests):
    for inside, texts in {
        "2": ("```json\n1\n```\ntext\n```json\n2\n```",),
        "1": ("```JSON \n1\n```", "```json\n1\n```\n```json\n2"),
        "": ("```\n1\n```", "```json 1 ```", "1"),
    }.items():
        for text in texts:
            with subtests.test(text=text):
                assert last_block(text) == inside


def test_the_last_block_partial_credit_and_formats_are_options():
    text = 'Sure!\n```json\n{"name": "Ada"}\n```\nAnything else?'
    assert judged(text, where="last_block").value == 1.0
    assert judged('{"name": "Ada"}', where="last_block").status == "no_answer"
    assert judged('{"age": 1}', partial=0.2).value == 0.2
    assert judged("age: 1", partial=0.2).value == 0.0, "partial credit is for JSON alone"
    schema = {"type": "string", "format": "date"}
    assert judged('"tomorrow"', schema).value == 1.0
    assert judged('"tomorrow"', schema, formats=True).value == 0.0
    assert judged('"2026-02-28"', schema, formats=True).value == 1.0


def test_the_detail_names_the_place():
    assert (
        judged('{"name": "Ada", "age": "old"}').detail == 'does not fit at [\'age\']: "old" is not of type "integer"'
    )


def test_a_schema_comes_from_a_column_as_text_or_mapping():
    for schema in (PERSON, json.dumps(PERSON)):
        assert judged_by_column('{"name": "Ada"}', schema).value == 1.0


@pytest.mark.parametrize("schema", [None, 3, "", "{", "[]", "true", '{"type": "nope"}', {"a": {1}}, "[" * 10_000])
def test_a_bad_schema_in_the_dataset_has_no_value(schema):
    verdict = judged_by_column("{}", schema)
    assert (verdict.value, verdict.status) == (None, "gold_invalid")


def test_a_bad_schema_in_the_configuration_is_refused(subtests):
    for schema in (
        *({"type": "nope"}, {"pattern": "("}, {"pattern": r"(a)\1"}, {"pattern": "(?=a)b"}),
        *({"$ref": "#/$defs/absent"}, {"$schema": "http://example.com/own", "type": "string"}),
        {"const": float("nan")},
    ):
        with subtests.test(schema=schema), pytest.raises(RuleError, match="the schema cannot be used"):
            JsonSchema(schema)


@pytest.mark.parametrize("reference", ["{uri}", "{uri}#/properties/name", "http://127.0.0.1:9/x.json", "person.json"])
def test_references_never_leave_the_schema(tmp_path, reference):
    path = tmp_path / "person.json"
    path.write_text(json.dumps(PERSON))  # It could be read: only the refusal keeps it out.
    schema = {"$ref": reference.format(uri=path.as_uri())}
    with pytest.raises(RuleError, match="references stay inside the schema"):
        JsonSchema(schema)
    assert judged_by_column("{}", schema).status == "gold_invalid"


def test_brackets_in_strings_are_no_levels():
    assert nesting('{"a": ["[[[", "\\"[{"], "b": {}}') == 2


def test_size_and_depth_are_limited(subtests):
    for text, status in (
        *(("[" * 65 + "]" * 65, "too_complex"), ("[" * 64 + "]" * 64, "ok"), ("[" * 100_000, "too_complex")),
        ('"' + "a" * MAX_CHARS + '"', "too_long"),
    ):
        with subtests.test(text=text):
            assert judged(text, {"type": "array"}).status == status


RECURSIVE = {
    "$defs": {
        "node": {
            "oneOf": [
                {"type": "object", "properties": {"a": {"$ref": "#/$defs/node"}}, "required": ["a"]},
                {"type": "object", "properties": {"a": {"$ref": "#/$defs/node"}}, "required": ["a", "b"]},
                {"type": "integer"},
            ]
        }
    },
    "$ref": "#/$defs/node",
}


def test_hostile_json_is_judged_within_a_second(subtests):
    for schema, text in (
        ({"pattern": "^(a+)+$"}, json.dumps("a" * 190_000 + "!")),
        ({"pattern": "^(a|aa)+$"}, json.dumps("a" * 190_000 + "!")),
        ({"uniqueItems": True}, json.dumps([[n] for n in range(20_000)])),
        (RECURSIVE, '{"a": ' * 60 + '"x"' + "}" * 60),  # Its errors, listed, would be 2 to the power of 60.
        *((PERSON, '"' * MAX_CHARS), (PERSON, '{"a":"\\"' * 20_000)),
    ):
        row = Row(None, text, None, {})
        with subtests.test(schema=schema, text=text[:9]):
            assert timed(partial(JsonSchema(schema).score, row))[1] < 1.0


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=())),
    lambda inside: st.lists(inside) | st.dictionaries(st.text(), inside),
    max_leaves=20,
)
TEXTS = st.text(st.characters(exclude_categories=())) | JSON.map(json.dumps) | st.text('{}[]",:\\0e-n`\n')


@pytest.mark.slow
@given(text=TEXTS, where=st.sampled_from(["all", "last_block"]))
def test_any_completion_gets_a_value(text, where):
    verdict = judged(text, where=where, partial=0.5)
    assert verdict.value in (0.0, 0.5, 1.0)
    assert verdict == judged(text, where=where, partial=0.5)


@pytest.mark.slow
@given(value=JSON)
def test_json_is_taken_exactly_when_it_is_finite_and_unicode(value):
    assume("think>" not in json.dumps(value))  # A think tag is one inside of strings too.
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
        sound = True
    except ValueError:
        sound = False
    assert judged(json.dumps(value), {}).value == float(sound)
