"""RuleSet from a mapping or a YAML file, and back; what is wrong is named with file and line."""

import dataclasses
from importlib.metadata import EntryPoint

import pytest
import yaml

from trl_ext.errors import ConfigError, RuleError
from trl_ext.rewards import Answer, Call, Keywords, Length, Pattern, Repetition, RuleSet, Tags, config

RULES_YAML = """\
rules:
  - {rule: answer, gold: solution, kind: number}
  - {rule: length, high: 24, weight: 0.1, gate: answer}
  - rule: tags
    tags: [think, answer]
  - {rule: keywords, required: [所以, because], name: reasons}
clip: [-1, 1]
"""


@pytest.fixture
def write(tmp_path):
    def write_rules(text: str):
        path = tmp_path / "rules.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write_rules


def first_char(row) -> float:
    return 1.0


def test_a_yaml_file_gives_the_rules_that_it_lists(write):
    assert RuleSet.from_yaml(write(RULES_YAML)) == RuleSet(
        [
            *(Answer(gold="solution"), Length(high=24, weight=0.1, gate="answer"), Tags("think", "answer")),
            Keywords(required=("所以", "because"), name="reasons"),
        ],
        clip=(-1, 1),
    )


def test_every_shipped_rule_survives_the_round_trip():
    rules = RuleSet(
        [
            *(Answer(where="all", weight=2), Tags("think", "answer", gate="answer"), Pattern(r"\d+", timeout_s=1.0)),
            *(Length(low=1, slack=3, unit="words"), Keywords(required=("a b",), forbidden=("c",), name="words")),
            Repetition(ngram=2),
        ],
        clip=(-1, 1),
        name="maths",
    )
    assert RuleSet.from_dict(rules.to_dict()) == rules


def test_a_mapping_holds_only_what_differs_from_the_defaults():
    rules = RuleSet([Answer(), Length(high=24, weight=0.1, gate="answer")])
    length = {"rule": "length", "high": 24, "weight": 0.1, "gate": "answer"}
    assert rules.to_dict() == {"rules": [{"rule": "answer"}, length]}
    (entry,) = RuleSet([Call(first_char)]).to_dict()["rules"]
    assert entry == {"rule": "call", "function": f"{__name__}.first_char", "name": "first_char"}


def test_a_rule_of_ones_own_is_named_by_its_path(write, tmp_path, monkeypatch):
    (tmp_path / "house_rules.py").write_text(
        "from trl_ext.rewards import Rule, Verdict\n\n\n"
        "class Polite(Rule):\n"
        "    def score(self, row):\n"
        "        return Verdict(float('please' in row.text))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    rules = RuleSet.from_yaml(write("rules: [{rule: house_rules.Polite, weight: 0.5}]"))
    assert rules(completions=["yes please", "no"]) == [0.5, 0.0]
    assert rules.to_dict() == {"rules": [{"rule": "house_rules.Polite", "weight": 0.5}]}


def test_what_is_wrong_in_a_file_is_named_with_its_line(write, subtests):
    for text, message in (
        ("rules:\n  - rule: answr", "rules.yaml, line 2: unknown rule 'answr'. Did you mean 'answer'?"),
        ("rules:\n  - rule: answer\n    glod: x", "rules.yaml, line 3: rule 'answer' has no key 'glod'. Did you mean"),
        ("rules: [{rule: answer}]\nclipp: [0, 1]", "line 2: unknown key 'clipp'. Did you mean 'clip'?"),
        (
            "model_name_or_path: x\nrules: [{rule: answer}]",
            "rules.yaml is a recipe. Give rules.yaml of a run's folder",
        ),
        ("rules:\n  - rule: length\n    low: 9\n    high: 2", "line 2: Rule 'length': low=9 is above high=2."),
        ("rules:\n  - {rule: answer, weight: 1e-3}", "line 2: Rule 'answer': weight is '1e-3'. Give a finite number"),
        ("rules:\n  - {rule: pattern}", "line 2: rule 'pattern' needs the key 'pattern'."),
        ("rules:\n  - {rule: answer, gate: x}", "rules.yaml: Rule 'answer' has the gate 'x'."),
        ("rules:\n  - {gold: answer}", "line 2: {'gold': 'answer'} names no rule."),
        ("rules:\n  - rule: answer\n    gold: a\n    gold: b", "line 4: the key 'gold' is given twice."),
        *(("rules: []", "at least one rule"), ("rules: {rule: answer}", "has no list of rules")),
        *(("", "has no list of rules"), ("rules: [", "is not valid YAML")),
        ("rules: [{rule: no_such.Rule}]", "line 1: 'no_such.Rule' cannot be imported"),
        ("rules: [{rule: pathlib.Path}]", "line 1: 'pathlib.Path' is not a subclass of trl_ext.rewards.Rule."),
        ("rules: [{rule: call, function: x}]", "line 1: 'x' cannot be imported"),
        ("rules: [{rule: call, function: math.pi}]", "not a module-level function"),
        ("rules: [{rule: trl_ext.rewards.Rule}]", "abstract"),
    ):
        with subtests.test(text=text):
            with pytest.raises(ConfigError) as caught:
                RuleSet.from_yaml(write(text))
            assert message in str(caught.value)


def test_a_file_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match=r"nowhere\.yaml cannot be read"):
        RuleSet.from_yaml("nowhere.yaml")


def test_a_mapping_without_lines_names_the_place_by_its_path():
    with pytest.raises(ConfigError, match=r"The mapping, rules\[1\]\.glod: rule 'answer' has no key 'glod'"):
        RuleSet.from_dict({"rules": [{"rule": "repetition"}, {"rule": "answer", "glod": "x"}]})


def test_a_package_offers_rules_under_short_names(write, tmp_path, monkeypatch):
    (tmp_path / "offering.py").write_text("from trl_ext.rewards import Length\n\n\nclass Brief(Length):\n    pass\n")
    entry = EntryPoint("brief", "offering:Brief", config.GROUP)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(config, "entry_points", lambda group: [entry] if group == config.GROUP else [])
    (rule,) = RuleSet.from_yaml(write("rules:\n  - {rule: brief, high: 3}")).rules
    assert (type(rule).__name__, rule.name, rule.high) == ("Brief", "brief", 3)


WRONG = {
    "normalise": ["'false'", "'true'", "yes please", "0", "1", "[true]", "{on: true}"],
    "isolate": ["'false'", "'no'", "0", "2.5", "[]"],
    "on_error": ["ignore", "true", "[stop]", "5"],
    "on_unscored": ["maybe", "false", "{error: 1}"],
    "name": ["5", "true", "a b", "[rules]", "''"],
    "clip": ["1", "'-1, 1'", "[1, -1]", "[a, b]", "[true, 2]", "[1]", "true"],
    "limits": ["5", "[1]", "true", "fast", "{cpu_s: '2'}", "{workers: true}", "{batch_s: [1]}"],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in WRONG.items() for value in values])
def test_a_value_of_the_wrong_type_for_a_key_of_the_set_is_refused_with_its_line(key, value, write):
    with pytest.raises(ConfigError, match=r"(?s)rules.yaml, line 2: .*\. (Give|Write) "):
        RuleSet.from_yaml(write(f"rules: [{{rule: answer}}]\n{key}: {value}\n"))


def test_each_key_of_the_set_has_wrong_values_to_refuse():
    assert set(WRONG) == set(config._SET_KEYS)


def test_limits_that_are_no_limits_are_refused_in_python():
    with pytest.raises(RuleError, match=r"limits is .*Give Limits"):
        RuleSet([Answer()], limits={"cpu_s": 2})


NEEDED = {
    "call": {"function": f"{__name__}.first_char"},
    "judge": {"model": "m"},
    "rubric": {"model": "m", "criteria": ["polite"]},
    "json_schema": {"schema": {"type": "object"}},
    "keywords": {"required": ["a"]},
}
FLAGS = [
    (name, field.name)
    for name, kind in config.SHIPPED.items()
    for field in dataclasses.fields(kind)
    if isinstance(field.default, bool)
]


@pytest.mark.parametrize(("name", "flag"), FLAGS)
def test_a_flag_of_a_rule_in_quotes_is_refused_with_its_line(name, flag, write):
    entry = {"rule": name, **NEEDED.get(name, {}), flag: "false"}
    with pytest.raises(ConfigError, match=rf"line 2: .*{flag} is 'false'. Give true or false"):
        RuleSet.from_yaml(write(yaml.safe_dump({"rules": [entry]})))
