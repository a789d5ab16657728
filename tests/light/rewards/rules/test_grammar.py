"""Grammar by Harper, and by a stand-in for LanguageTool's server."""

# ruff: noqa: RUF001  Letters and marks that look alike are the subject.

import json
import threading
import time

import pytest

from tests.language_tool import LanguageToolServer
from trl_ext.errors import ConfigError, RuleError, SupportError
from trl_ext.rewards import Grammar, LanguageTool, Row, RuleSet, Verdict
from trl_ext.rewards.config import build_rules
from trl_ext.rewards.rules import grammar as module

GOOD = "Janet's ducks lay 16 eggs a day. She eats three for breakfast and sells the rest."
BAD = "Janet ducks lays 16 egg a day. She eat three for breakfast and sells the the rest."
RIGHT = (
    *(GOOD, "First, add them:\n\n1. Take nine.\n2. Double it.", "It costs $5 and not $6.", "He **really** meant it."),
    *("So $x^2$ is even, and `print(x)` shows it.", "See https://example.org for more.\n\n```\nthe the xkcdq\n```"),
)


@pytest.fixture
def harper():
    pytest.importorskip("harper")


def judged(text: str, **fields) -> Verdict:
    return Grammar(**fields).score(Row(None, text, None, {}))


@pytest.mark.usefixtures("harper")
def test_mistakes_lower_the_value_and_are_named():
    assert judged(GOOD) == Verdict(1.0, "ok", "0 findings in 16 words")
    assert judged(BAD).value < 0.6 and "the the" in judged(BAD, zero_at=50).detail
    assert judged(BAD).value < judged(BAD, zero_at=50).value < 1.0
    assert judged("Xkcdq zvbn rewq poiu.").value == 0.0


@pytest.mark.usefixtures("harper")
def test_what_is_right_is_no_finding(subtests):
    for text in RIGHT:
        with subtests.test(text):
            assert judged(text).value == 1.0


@pytest.mark.usefixtures("harper")
def test_a_text_without_words_earns_the_floor_and_one_in_another_script_no_more(subtests):
    for text in ("", "...", "$x = 18$", "```\nShe is good.\n```", "((((", "\u200b", "😀", "42"):
        with subtests.test(ascii(text)):
            assert (judged(text).value, judged(text).status) == (0.0, "no_answer")
    for text in ("今天天气很好。", "Das Wetter ist heute schön.", "Погода сегодня хорошая."):
        with subtests.test(text):
            assert judged(text).value == 0.0


@pytest.mark.usefixtures("harper")
def test_dialects_spell_in_their_own_way_and_thoughts_can_be_left_out():
    assert judged("The colour is grey.", dialect="american").value < 1.0
    assert judged("The colour is grey.", dialect="british").value == judged("The colour is grey.").value == 1.0
    assert (
        judged(f"<think>{BAD}</think>{GOOD}").value < judged(f"<think>{BAD}</think>{GOOD}", where="after_think").value
    )


BRITISH = (
    "In autumn the colour of a leaf fades, because its cells stop making chlorophyll. Yellow was there all summer.",
    "The mobilisations were organised by the labour party, which realised that its programme had to be modernised.",
    "Practise your scales daily, and favour slow practice. A neighbour who travelled a lot will recognise the tune.",
    "Season the dish with salt, and then analyse the flavour. The centre should be grey, and the mould cleaned.",
    "The aluminium catalogue was labelled and modelled at the theatre; its licence has been cancelled.",
)


@pytest.mark.usefixtures("harper")
@pytest.mark.parametrize("text", BRITISH)
def test_the_spelling_of_another_english_is_no_mistake(text):
    assert judged(text) == Verdict(1.0, "ok", judged(text).detail)
    assert judged(text, dialect="american").value < 1.0
    wrong = text.replace("the ", "teh ", 1)
    assert judged(wrong).value < 1.0


@pytest.mark.usefixtures("harper")
def test_a_long_text_is_checked_whole_in_parts_and_a_longer_one_not_at_all():
    text = " ".join([GOOD] * 60 + [BAD])
    for long in (text, "(" * 9000, "\n" * 9000, "a " * 4000):
        parts = module._PARTS.findall(long)
        assert "".join(parts) == long and max(map(len, parts)) <= 2000
    assert judged(text).detail.split()[0] == judged(BAD).detail.split()[0]
    assert judged("a " * 10_001).status == "too_long"


@pytest.mark.usefixtures("harper")
def test_workers_and_threads_check_at_once():
    rules, alone = RuleSet([Grammar()], isolate=True), judged(BAD).value
    assert rules(completions=[GOOD, BAD] * 8) == [1.0, alone] * 8
    rules.close()
    found: list[float | None] = []
    threads = [threading.Thread(target=lambda: found.append(judged(BAD).value)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [alone] * 4


def test_without_harper_it_is_not_built(monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'trl_ext\[grammar\]'"):
        build_rules({"rules": [{"rule": "grammar"}]})


# LanguageTool ----------------------------------------------------------------------------------------------------

MATCH = {"message": "Ein Fehler.", "offset": 0, "length": 3, "replacements": [], "rule": {"id": "X"}}
SERVER = LanguageToolServer()


def told(answer, text="Das ist ein Satz.", language="de-DE", **fields):
    SERVER.answers(found(0))
    rules = RuleSet([LanguageTool(SERVER.url, language=language, retries=0, **fields)])
    SERVER.answers(answer)
    return rules.explain("?", text).parts[0]


def found(number):
    return lambda text: json.dumps({"software": {}, "matches": [MATCH] * number}).encode()


def test_the_matches_of_a_server_are_counted_by_words_and_in_chinese_by_characters():
    assert told(found(0)).value == 1.0
    part = told(found(1), "Das ist `x` ein Satz, der zehn Wörter und einen Fehler haben soll.")
    assert part.value == pytest.approx(1 - 100 / 12 / 20) and "Ein Fehler." in part.detail
    assert SERVER.asked == [
        (
            "/v2/check",
            {"language": ["de-DE"], "text": ["Das ist x ein Satz, der zehn Wörter und einen Fehler haben soll."]},
        )
    ]
    assert told(found(1), "秋天白昼变短，树木停止合成叶绿素。", "zh-CN").value == pytest.approx(1 - 100 / 15 / 20)
    assert told(found(9)).value == 0.0
    assert told(found(0), "```\nx\n```").status == "no_answer" and not SERVER.asked


HOSTILE = {
    "HTML": (b"<html>busy</html>", "no_score"),
    "a list": (b"[]", "no_score"),
    "no matches": (b"{}", "no_score"),
    "a number": (b'{"matches": 0}', "no_score"),
    "a mapping": (b'{"matches": {"a": 1}}', "no_score"),
    "a list of texts": (b'{"matches": ["a"]}', "no_score"),
    "deep": (b"[" * 100_000, "no_score"),
    "3 MB": (b'{"matches": [' + b"{}," * 1_000_000 + b"{}]}", "no_score"),
    "refused": (413, "refused"),
    "down": (503, "infra_error"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_another_reply_earns_the_floor_and_a_server_that_fails_has_no_value(what):
    said, status = HOSTILE[what]
    part = told(lambda text: said)
    assert (part.status, part.value) == (status, None if status == "infra_error" else 0.0)


def test_a_server_that_never_answers_is_given_up():
    part = told(lambda text: time.sleep(1) or b"{}", timeout_s=0.1)
    assert part.status == "infra_error" and "no answer within 0.1 s" in part.detail


def test_a_matchs_long_message_is_cut():
    reply = json.dumps({"matches": [MATCH | {"message": "x" * 10_000}] * 9}).encode()
    assert len(told(lambda text: reply).detail) < 400


@pytest.mark.parametrize("reply", [b"{}", b"[]", b"<html>", 404])
def test_without_such_a_server_it_is_not_built_and_the_command_is_told(reply):
    SERVER.answers(lambda text: reply)
    for url in (SERVER.url, "http://127.0.0.1:9"):
        with pytest.raises(SupportError, match=r"checks no 'de-DE'.*docker run --rm -p 8010:8010"):
            LanguageTool(url, language="de-DE")


def test_a_language_that_the_server_lacks_and_an_address_that_is_none_are_refused():
    SERVER.answers(found(0))
    with pytest.raises(SupportError, match="checks no 'german'"):
        LanguageTool(SERVER.url, language="german")
    with pytest.raises(RuleError, match="url is 'localhost:8010'"):
        LanguageTool("localhost:8010", language="de")
