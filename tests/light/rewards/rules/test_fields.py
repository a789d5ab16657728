"""Fields that cannot work are refused when a rule is built, with the rule's name and a sentence."""

from typing import Any

import pytest

from trl_ext.errors import RuleError
from trl_ext.rewards import (
    Answer,
    Code,
    Grammar,
    Instructions,
    JsonSchema,
    Keywords,
    Language,
    Length,
    Math,
    Pattern,
    Relevance,
    Repetition,
    Rule,
    Tags,
)
from trl_ext.rewards.isolation.sandbox import api

NAN = float("nan")
COLUMN, WHOLE = "Give the name of a dataset column", "Give a whole number of at least"
# Rule, and by what its sentence holds besides the rule's name: fields, or arguments.
Refused = dict[str, list[dict[str, Any] | tuple[Any, ...]]]
REFUSED: list[tuple[type[Rule], Refused]] = [
    (Answer, {"kind is": [{"kind": "maths"}], "where is": [{"where": "end"}], COLUMN: [{"gold": ""}, {"gold": 3}]}),
    (
        Code,
        {
            "mode is 'pytest'": [{"mode": "pytest"}],
            "require is": [{"require": "L3"}, {"require": 1}],
            COLUMN: [{"tests": ""}, {"entry_point": ""}],
            "at least 0.1": [{"cpu_s": 0}, {"cpu_s": "2"}],
            "at least 64": [{"memory_mib": 10}],
            "at least 1": [{"output_kib": 0}],
            "true or false": [{"partial": "yes"}, {"unclosed_fence": 1}, {"numpy": "1.26"}],
            "at least 256": [{"numpy": True, "memory_mib": 128}],
            "compare is 'floats'": [{"compare": "floats"}],
            "from 0 to below 1": [{"tolerance": 1}],
            "setup is for mode 'asserts'": [{"setup": "prompt"}],
            "the tests compare": [{"mode": "asserts", "tolerance": 0.1}],
        },
    ),
    (
        Grammar,
        {
            "where is": [{"where": "think"}],
            "dialect is": [{"dialect": "scottish"}],
            "findings above 0": [{"zero_at": 0}, {"zero_at": "20"}],
        },
    ),
    (Instructions, {COLUMN: [{"column": ""}, {"column": 3}], "true or false": [{"strict": "yes"}]}),
    (
        JsonSchema,
        {
            "a column's name or a mapping": [{"schema": ""}, {"schema": 3}],
            "where is": [{"where": "first_block"}],
            "from 0 to below 1": [{"partial": 1.0}, {"partial": -0.1}],
            "true or false": [{"formats": "yes"}],
        },
    ),
    (
        Keywords,
        {
            "no keywords": [{}],
            "a list of words": [{"required": "cat"}],
            "different words": [{"required": (" ",)}, {"required": ("\u200b",)}, {"required": ("Cat", "cat")}],
            "Take it out": [
                {"required": ("Cat",), "forbidden": ("cat",)},
                {"required": {"cat": 3}, "forbidden": {"cat": 2}},
            ],
            WHOLE: [{"required": {"cat": 0}}, {"required": {"cat": "2"}}, {"forbidden": {"cat": -1}}],
            "a word and a count": [{"required": [["cat"]]}, {"required": [3]}],
        },
    ),
    (
        Language,
        {
            "language is": [{"language": "english"}, {"language": "xx"}],
            "a share above 0": [{"language": "zh", "enough": 0}],
            "where is": [{"language": "zh", "where": 1}],
        },
    ),
    (
        Length,
        {
            "low <= high": [{"low": 5, "high": 2}],
            WHOLE: [{"slack": -1}, {"high": "24"}],
            "unit is": [{"unit": "bytes"}],
        },
    ),
    (
        Math,
        {
            "where is": [{"where": "end"}],
            "multiple is": [{"multiple": "first"}],
            COLUMN: [{"gold": ""}],
        },
    ),
    (
        Pattern,
        {
            "does not compile": [{"pattern": "(a"}],
            "Give a regular expression": [{"pattern": ""}, {"pattern": None}],
            "timeout_s is 0": [{"pattern": "a", "timeout_s": 0}],
            "'full', 'search'": [{"pattern": "a", "mode": "match"}],
        },
    ),
    (
        Relevance,
        {"a cosine above 0": [{"enough": 0}, {"enough": 1.1}, {"enough": "1"}], "where": [{"where": "think"}]},
    ),
    (Repetition, {"ngram is 0": [{"ngram": 0}]}),
    (Tags, {"Give": [(), ("think", "think"), ("<think>",), ("a b",), ("",)]}),
]


@pytest.mark.parametrize(("kind", "refused"), REFUSED)
def test_fields_that_cannot_work_are_refused(kind, refused, subtests, monkeypatch):
    monkeypatch.setattr(api, "sandbox_level", lambda **_: (2, ""))
    for sentence, changes in refused.items():
        for given in changes:
            with subtests.test(sentence, given=repr(given)), pytest.raises(RuleError) as caught:
                kind(**given) if isinstance(given, dict) else kind(*given)
            assert sentence in str(caught.value) and str(caught.value).startswith("Rule '")
