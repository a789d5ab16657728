"""Prompt templates: columns are filled in, and nothing else can be reached from a field."""

import pytest

from trl_ext.errors import ConfigError
from trl_ext.scripts.data.prompts import PromptTemplate

ROW = {"question": "1 + 1?", "a b": "x", "digits": 3, "a.b": "dotted"}
FILLED = {
    "{question}\nLet's think step by step.": "1 + 1?\nLet's think step by step.",
    "{question} {question} {digits}": "1 + 1? 1 + 1? 3",
    "{a b}{a.b}": "xdotted",
    r"{question} Answer in \boxed{{}}.": r"1 + 1? Answer in \boxed{}.",
}
REFUSED = {
    r"{question} \boxed{}": "more or less than a column's name: ''",
    "{question": "expected '}' before end of string. Double the braces that stay",
    "{question}}": "Single '}' encountered in format string. Double",
    "{question!r}": "more or less than a column's name: 'question'",
    "{question:>{digits}}": "more or less than a column's name: 'question'",
    "no field": "names no column",
}


def test_columns_are_filled_in():
    assert {text: PromptTemplate.parse(text).filled(ROW, {}) for text in FILLED} == FILLED
    # A renamed column is found by its own name, and braces of a row are text.
    assert PromptTemplate.parse("{question}?").filled({"prompt": "1"}, {"question": "prompt"}) == "1?"
    braces = "{digits}{0.__class__}"
    assert PromptTemplate.parse("{question}").filled({"question": braces}, {}) == braces


def test_what_is_no_name_of_a_column_is_a_sentence(subtests):
    for text, words in REFUSED.items():
        with subtests.test(text):
            with pytest.raises(ConfigError) as caught:
                PromptTemplate.parse(text)
            assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_field_is_one_name_however_it_looks():
    for text in ("{a.__class__}", "{question.__class__.__init__}", "{question[0]}", "{0}"):
        assert PromptTemplate.parse(text).fields == [text[1:-1]]
