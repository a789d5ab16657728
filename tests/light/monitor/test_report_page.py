"""The page of a run: what stands in it, how long it may be, and that all data in it is text."""

import json
import re
from html.parser import HTMLParser

import pytest

from tests.run_folder import HOSTILE, entry, write_run, write_table
from trl_ext.monitor.pages.page import RunFacts, report_page
from trl_ext.monitor.pages.report import write_report
from trl_ext.monitor.pages.samples import read_samples
from trl_ext.monitor.words import cut, short, visible

VOID = {"meta"}


class Page(HTMLParser):
    """A page's elements, its text by section, and every attribute that could run or fetch something."""

    def __init__(self, html):
        super().__init__()
        self.open, self.tags, self.sections, self.texts, self.harmful = [], [], [], {}, []
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        attributes = dict(attributes)
        if tag == "section":
            self.sections.append(attributes["id"])
        self.harmful += [name for name in attributes if name.startswith("on") or name in ("src", "href", "style")]

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.sections:
            self.texts[self.sections[-1]] = self.texts.get(self.sections[-1], "") + data


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture(scope="module")
def html(folder):
    write_report(folder)
    return (folder / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(html):
    return Page(html)


def page_of(log, **facts):
    return Page(report_page(log, RunFacts(**facts)))


def test_every_section_is_there_in_order(page):
    names = ["verdict", "curves", "samples", "time", "memory", "held-out", "steps", "settings"]
    assert page.sections == names


def test_the_head_says_what_was_run_when_and_how_it_ended(html):
    head = html[html.index("<h1>") : html.index('<section id="curves">')]
    assert "GRPO on org/&lt;model&gt;" in head and "data: org/data" in head and "2026-11-22 18:00 UTC" in head
    assert "It learned: reward rose from 0.10 to 0.90 on held-out problems" in head
    assert "Finished: 20 of 20 steps in 1:01" in head


def test_the_plan_is_told_in_words_and_a_damaged_one_is_not(page, tmp_path):
    assert "plan of 40 GiB" in page.texts["memory"] and "38.2 of 45.0 GiB on a card, in update" in page.texts["memory"]
    assert "12.3 s" in page.texts["memory"] and "trl-ext grpo --config quickstart" in page.texts["settings"]
    folder = write_run(tmp_path / "run")
    (folder / "plan.json").write_text('{"label": 1, "peak_gib": "<b>", "usable_gib": null, "step_s": []}')
    write_report(folder)
    assert "The plan" not in (folder / "report.html").read_text()


def test_each_group_of_samples_has_prompt_gold_total_and_explanation(page):
    text = page.texts["samples"]
    for word in ("First", "Last", "Best", "Worst", "Most disputed between rules"):
        assert word in text
    assert "3 + 0 <b>?</b>" in text and "total -2.000" in text and "gold whole text: 7" in text


def test_nothing_of_a_completion_is_markup_and_what_cannot_be_seen_is_spelled_out(html, page):
    assert not page.harmful and not {"script", "img"} & set(page.tags)
    assert "<script" not in html and "<img" not in html
    assert HOSTILE[0] in page.texts["samples"]  # as text
    assert "default-src 'none'" in html and "http" not in html.replace("http-equiv", "")
    assert "\x1b" not in html and "\x00" not in html and "\u202e" not in html
    text = page.texts["samples"]
    assert r"\u001b[31mred\u0000 \u202egnp.exe\u202c" in text and "the end" in text
    length = len(HOSTILE[1].replace("\ud800", ""))
    assert f"[... {length - 2400:,} characters ...]" in text and f"Completion, {length:,} characters" in text


def test_what_an_earlier_run_has_saved_says_nothing_of_this_one(tmp_path):
    folder = write_run(tmp_path / "run", num_steps=40)
    log = [entry(1, 2), entry(2, 2), {"step": 2, "train_runtime": 5.0}]
    write_report(folder, log)
    assert "Finished: 2 steps in 0:05" in (folder / "report.html").read_text()


def test_a_log_of_one_step_shows_points_and_lone_surrogates_can_be_written():
    html = report_page([entry(1, 1)], RunFacts())
    assert html.count("<circle") >= 3
    assert "too little to judge" in html
    page = page_of([{"step": 1, "reward": 0.5, "rewards/\ud800/mean": 0.5}])
    assert r"\ud800" in page.texts["curves"]


@pytest.mark.slow
def test_thousands_of_steps_stay_readable_and_small(tmp_path):
    folder = write_run(tmp_path / "long", num_steps=2000, rules=40)
    write_report(folder)
    html = (folder / "report.html").read_text()
    assert len(html) < 1_000_000
    assert html.count("<tr>") < 200 and "50 of 2,000 logged steps" in html
    assert "<circle" in html and html.count("<circle") < 20  # the held-out ones
    longest = max(html.split('d="'), key=len).partition('"')[0]
    assert longest.count("L") < 1000
    assert re.findall(r'aria-label="(.*) over optimizer steps"', html) == ["Mean reward"]


def test_without_completions_the_page_says_what_to_do_and_of_a_reward_model_nothing():
    assert "log_completions: true" in page_of([entry(1, 1)]).texts["samples"]
    assert "samples" not in page_of([{"step": 1, "accuracy": 0.5, "loss": 0.7}]).sections


# Samples ----------------------------------------------------------------------------------------------------------


def test_samples_are_the_best_the_worst_and_the_most_disputed(folder):
    groups = read_samples(folder, {"rules"}).groups
    totals = {name: [one.total for one in ones] for name, ones in groups.items()}
    assert totals["Best"] == [0.875, 0.875] and totals["Worst"] == [-2.0, -2.0]
    assert totals["Most disputed between rules"] == [0.5, 0.5]  # one gives 1, the other takes
    assert [one.step for one in groups["Best"]] == [20, 1]
    everything = [(one.step, one.prompt) for ones in groups.values() for one in ones]
    assert len(set(everything)) == len(everything) == 10


def test_several_reward_functions_count_with_their_weights(tmp_path):
    rows = [
        {"step": 1, "prompt": "p", "completion": "c", "a": 1.0, "b": value, "advantage": 0.0} for value in (0.0, 1.0)
    ]
    write_table(tmp_path, 1, rows)
    groups = read_samples(tmp_path, {"a", "b"}, [1.0, -3.0]).groups
    totals = [one.total for ones in groups.values() for one in ones]
    assert sorted(totals) == [-2.0, 1.0]
    shown = next(one for ones in groups.values() for one in ones if one.total == -2.0)
    assert [(part.rule, part.value) for part in shown.parts] == [("a", 1.0), ("b", 1.0)]


def test_a_damaged_table_is_named_and_the_others_are_shown(tmp_path):
    folder = write_run(tmp_path / "run")
    (folder / "completions" / "completions_00003.parquet").write_bytes(b"PAR1 no")
    samples = read_samples(folder, {"rules"})
    assert samples.groups and samples.num_tables == 3
    assert [name.partition(":")[0] for name in samples.damaged] == ["completions_00003.parquet"]


def test_traces_that_are_none_are_left_out(tmp_path):
    rows = [
        {"step": 1, "prompt": "p", "completion": None, "rules": None, "rule_trace": text, "advantage": None}
        for text in ("[", "[1]", '{"a": 1}', '{"a": [null, 1, "x"]}', "[" * 5000)
    ]
    write_table(tmp_path, 1, rows)
    assert read_samples(tmp_path, {"rules"}).groups["First"][0].total is None
    write_report(tmp_path, [entry(1, 1)])
    assert "no reward" in (tmp_path / "report.html").read_text()


def test_tool_calls_stand_in_a_conversation(tmp_path):
    call = {"function": {"name": "add", "arguments": json.dumps({"a": 1})}}
    answer = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_calls": None},
        {"role": "assistant", "content": "It is 2", "tool_calls": None},
    ]
    write_table(tmp_path, 1, [{"step": 1, "prompt": "p", "completion": answer, "rules": 1.0, "advantage": 0.0}])
    (one, *_) = read_samples(tmp_path, {"rules"}).groups["First"]
    assert "[assistant]" in one.completion and '"name": "add"' in one.completion and "[tool]\n2" in one.completion


# Words ------------------------------------------------------------------------------------------------------------


def test_numbers_and_texts_are_short_and_every_script_is_left_alone():
    values = (0, 0.4216, 0.0123, 12.345, 128.04, 1280, 12_345, 3_400_000, 4e-5, -0.5, 1e12)
    words = ["0.00", "0.42", "0.0123", "12.35", "128.0", "1,280", "12.3k", "3.4M", "4.0e-05", "-0.50", "1.0e+12"]
    assert [short(value) for value in values] == words
    assert cut("abc", 3) == "abc"
    assert cut("a" * 50 + "z" * 50, 8) == "aaaaaa\n[... 92 characters ...]\nzz"
    text = "数学 נכון क्\u200cष 👩\u200d🔬 ½ \u3000 a\tb\n"
    assert visible(text) == text
    assert visible("a\u202eb\u2066\x7f\U000e0041") == r"a\u202eb\u2066\u007f\U000e0041"
    assert visible("a\x1b[2J\nb\ud800") == "a\\u001b[2J\nb\\ud800"
