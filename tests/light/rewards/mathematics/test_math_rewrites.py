"""Our rules pay every harmless rewrite of a right answer and no harmful one: rewrites, and counts, of benchmarks/."""

import json
import sys

import pytest

from tests.conftest import ROOT
from trl_ext.rewards import Answer, Math, RuleSet

FORMULAS = r"3\sqrt{13}|\frac{\pi}{2}|x^2-5x+6|(1, 2)|x = 5|(0, 1) \cup [2, 3)|(x-2)(x-3)|2, -3".split("|")


@pytest.fixture
def rewritten(monkeypatch):
    """Returns what rewrites of golds earn by a rule."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from metamorphic import rewrite_golds

    def rewritten(rule, *golds, prompts=None):
        rules = RuleSet([rule], isolate=False)
        pairs = zip(prompts or ["?"] * len(golds), golds, strict=True)
        return rewrite_golds(rules, [{"prompt": one, "answer": gold} for one, gold in pairs])

    return rewritten


@pytest.mark.parametrize("rule", [Math(), Answer()])
def test_every_harmless_rewrite_of_a_number_is_paid_and_no_harmful_one(rule, rewritten):
    found = rewritten(rule, "18", "-7", "0.75", "1250", "3/4")
    assert found.ok and found.num_harmless_paid == found.num_harmless > 10 and found.num_harmful > 60


def test_math_is_held_on_formulas(rewritten):
    found = rewritten(Math(), *FORMULAS, "2, -3")
    assert found.surprises == () and found.num_harmless > 30 and found.num_harmful > 50


def test_who_pays_for_the_value_alone_is_not_asked_about_form(rewritten):
    assert rewritten(Math(form="any"), "18").ok


def test_texts_have_no_harmless_rewrites_and_long_ones_none_at_all(rewritten):
    assert not rewritten(Answer(kind="exact"), "18").num_harmless
    assert rewritten(Answer(kind="exact"), "word " * 60, None, ["a", "b"]).num_harmful == 0


@pytest.mark.slow
def test_no_harmful_rewrite_of_real_golds_is_paid(data_dir, rewritten):
    rows = [json.loads(line) for line in (data_dir / "math500_first250.jsonl").read_text().splitlines()][:80]
    found = rewritten(Math(), *(row["answer"] for row in rows), prompts=[row["problem"] for row in rows])
    assert found.ok, found.surprises[:5]
    assert found.num_harmful > 900 and found.num_harmless > 250


def test_labelled_answers_and_golds_are_counted(tmp_path, monkeypatch):
    hard = [
        {"id": 1, "ground_truth": "$5:8$", "fn_output": r"\frac{5}{8}", "tn_output": "8:5"},
        {"id": 2, "ground_truth": "4", "fn_output": "four", "tn_output": "4.0"},
    ]
    (tmp_path / "hard.json").write_text(json.dumps(hard))
    golds = ["3", r"a_0+\ldots+a_n", r"\boxed{"]
    (tmp_path / "golds.jsonl").write_text("\n".join(json.dumps({"answer": gold}) for gold in golds))
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import answers

    files = ["--hard_verify", f"{tmp_path}/hard.json", "--golds", f"{tmp_path}/golds.jsonl"]
    monkeypatch.setattr(sys, "argv", ["answers.py", *files, "--output", f"{tmp_path}/out.json"])
    answers.main()
    found = json.loads((tmp_path / "out.json").read_text())
    train = found["HardVerify-Math"]
    assert (train["right_and_paid"], train["wrong_and_paid"], train["missed"]) == (1, 1, ["2"])
    counted = found[f"golds of {tmp_path.name}"]
    forms = {name: told for name, told in counted.items() if name.startswith("as ")}
    assert len(forms) == 5 and set(forms.values()) == {"2 paid, 0 not"}
    assert counted == {"golds": 3, "own_text_paid": 2, "ok": 1, "undecided": 1, "gold_invalid": 1} | forms
