"""benchmarks/answers.py counts what the files of other projects would hold; here they have a line or two."""

import json
import sys

import pytest

from tests.conftest import ROOT

pytest.importorskip("math_verify")


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
    train = found["HardVerify-Math, train"]
    assert (train["right_and_paid"], train["wrong_and_paid"], train["missed"]) == (1, 1, ["2"])
    counted = found[f"golds of {tmp_path.name}"]
    assert counted == {"golds": 3, "own_text_paid": 2, "ok": 1, "undecided": 1, "gold_invalid": 1}
