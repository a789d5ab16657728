"""Each kind of instruction: texts that follow it and texts that only look as if."""

import json
from pathlib import Path
from typing import Any

import pytest

from trl_ext.rewards.base.rule import Row
from trl_ext.rewards.instruction_kinds.ifeval import count_sentences, count_words
from trl_ext.rewards.instruction_kinds.instructions import KNOWN, Instructions
from trl_ext.rewards.instruction_kinds.spec import sentences

# A line has where an instruction comes `from`, its `id`, its `arguments`, and texts that follow it or fail.
with Path(__file__).with_name("instructions.jsonl").open(encoding="utf-8") as file:
    CASES = [json.loads(line) for line in file]


def judged(name: str, text: str, arguments: dict[str, Any]) -> tuple[float | None, str]:
    verdict = Instructions().score(Row(None, text, None, {"instructions": [{"id": name, **arguments}]}))
    return verdict.value, verdict.detail


@pytest.mark.slow
def test_an_instruction_is_followed_or_not(subtests):
    for case in CASES:
        for text in (*case["followed"], *case["failed"]):
            with subtests.test(case["id"], text=text):
                followed = text in case["followed"]
                expected = (1.0, "all followed") if followed else (0.0, f"failed: {case['id']}")
                assert judged(case["id"], text, case["arguments"]) == expected


def test_each_id_of_ifeval_and_iftrain_has_a_case():
    # 25 of IFEval (arXiv:2311.07911) and 29 that arXiv:2507.02833 trains on; IFBench's are its test set.
    ids = {source: {case["id"] for case in CASES if case["from"] == source} for source in ("IFEval", "IFTrain")}
    assert [len(ids["IFEval"]), len(ids["IFTrain"])] == [25, 29]
    assert {case["id"] for case in CASES} == set(KNOWN)


def test_a_phrase_without_a_middle_is_no_phrase():
    with pytest.raises(ValueError, match="three words"):
        KNOWN["copy:repeat_phrase"].read({"phrase": "so what", "small_n": 2})


def test_words_are_runs_of_letters_and_digits(subtests):
    for text, num_words in {
        "I don't - do you?": 5,
        "well-known": 2,
        "3.5": 2,
        "做数学 now": 4,
        "...": 0,
        "": 0,
    }.items():
        with subtests.test(text):
            assert count_words(text) == num_words


NUM_SENTENCES = {
    "One. Two! Three?": 3,
    "Dr. Ada met J. Smith. They talked.": 2,
    "It costs $3.50. Really?!": 2,
    '"Why?" he asked. "So."': 3,
    "Fruits, e.g. apples, are good.": 1,
    "1. First\n2. Second": 1,
    "A heading\n\nA sentence.": 2,
    "no end": 1,
    "it is. so it is.": 2,
    "她来了。他走了\uff01": 2,
    "Wait... What?": 2,
    "***\n\n---": 0,
    ". . . .": 0,
}


def test_sentences_end_where_a_reader_ends_them(subtests):
    for text, num_sentences in NUM_SENTENCES.items():
        with subtests.test(text):
            assert count_sentences(text) == num_sentences


def test_sentences_are_split():
    assert sentences("Dr. Ada paid $3.50. Why? She had to") == ("Dr. Ada paid $3.50.", "Why?", "She had to")
    assert sentences("1. Go.\n2. Stop.") == ("1. Go.", "2. Stop.")
    assert sentences('He said "no." Then he left') == ('He said "no."', "Then he left")
    assert sentences("e.g. this") == ("e.g. this",) and sentences("") == ()
