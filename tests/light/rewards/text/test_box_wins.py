r"""A box, an answer tag or `####` is the answer, whatever is said of answers behind it; equal boxes are one answer."""

import pytest

from trl_ext.rewards import Answer, Math, Row

pytest.importorskip("math_verify")

STATED = (r"We get $\boxed{42}$.", r"\boxed{42}", "<answer>42</answer>", "so 6 * 7 = 42\n#### 42\n")
# What models say behind their answer. The numbers in it are no answer.
BEHIND = (
    *(" We may check our answer: $42/6=7$, so our answer is correct.", "\n\n**Check the answer:** 7 × 6 = 42 ✓."),  # noqa: RUF001
    " Double-checking my answer: 6*7 = 42, so the answer is consistent with the constraint of 50.",
    *(" Note: if the answer is required in dozens, it is 3.5.", " To verify the answer: 7 days and 6 hours."),
    *("\n\nLet's verify this answer: 42 - 7 = 35.", " If the answer were 43, it would not be even.", "\nA: 7 a day"),
    *(" The answer is 43 if Sunday counts.", " An answer of 43 is too large.", "\n\n## Answer check\n42/6 = 7"),
    *(" (The answer in hours is 1008.)", " The previous answer was 41.", "\nAnswer: 6 * 7, as above."),
    *(
        " I confirm the final answer.",
        " Does the answer = 7 * 6? Yes.",
        " A wrong answer is 24.",
        " I hope the answer is 1st.",
    ),
)
OVERRULED = (
    *(
        r" Wait, \boxed{43}.",
        " <answer>43</answer>",
        "\n#### 43",
        " The final answer is 43.",
        "\n\n**Final Answer:** 43",
    ),
    *(
        "\n\n**Final Answer**\n\n43",
        " Wait, the answer is 43.",
        " No, the answer is 43.",
        " Actually, the answer is 43.",
    ),
    *(" Correction: the answer is 43.", "\nSorry, the correct answer is 43."),
)


def values(text: str, gold: str = "42") -> tuple[float | None, float | None]:
    row = Row(None, text, None, {"answer": gold})
    return Answer().score(row).value, Math().score(row).value


@pytest.mark.parametrize("behind", BEHIND)
def test_no_sentence_behind_a_box_a_tag_or_hashes_overrides_it(behind):
    assert [text for text in STATED if values(text + behind) != (1.0, 1.0)] == []


@pytest.mark.parametrize("behind", OVERRULED)
def test_another_box_the_final_answer_and_a_correction_override_it(behind):
    for text in STATED:
        assert values(text + behind)[0] == values(text + behind)[1] == 0.0
        assert values(text + behind, "43")[0] == 1.0 or r"\boxed" in text + behind or "<answer>" in text + behind


def test_the_last_of_two_anchors_of_different_kinds_rules():
    for text in (r"<answer>41</answer> \boxed{42}", "#### 41\n<answer>42</answer>", "\\boxed{41}\n#### 42"):
        assert values(text) == (1.0, 1.0)
        assert values(text, "41") == (0.0, 0.0)


@pytest.mark.parametrize(
    "text",
    (
        *(
            "We get 7. Checking the answer: 6 * 7.",
            "Let me verify our answer: 7",
            "If the answer is 7, then 6 is not.",
        ),
        *("Double-check the answer: 7!", "To check my answer: 7 of 6", "Suppose the answer is 7."),
    ),
)
def test_a_check_and_a_supposition_announce_nothing(text):
    before = f"The answer is 42. {text}"
    assert values(before) == (1.0, 1.0)
    assert values(before, "7") == (0.0, 0.0)


EQUAL_BOXES = {
    "11+x": (r"\boxed{x+11} or \boxed{11+x}", r"\boxed{11+x}, that is \boxed{x + 11}"),
    "-34 + 12x": (r"\boxed{12x -34}, or \boxed{-34 + 12x}",),
    r"2\sqrt{3}": (r"\boxed{\sqrt{12}} = \boxed{2\sqrt{3}}", r"\boxed{2\sqrt3} so \boxed{2 \cdot \sqrt{3}}"),
    "(x+1)(x+2)": (r"\boxed{(x+2)(x+1)} or \boxed{(x+1)(x+2)}",),
    r"\frac{1}{2}": (r"\boxed{\frac12} or \boxed{0.5}", r"\boxed{0.5} = \boxed{\dfrac{1}{2}}"),
    r"\{1,2\}": (r"\boxed{\{2,1\}}, \boxed{\{1,2\}}",),
}
OTHER_BOXES = {
    "11+x": (r"\boxed{x+11} or \boxed{11-x}", r"\boxed{x+12} or \boxed{11+x}", r"\boxed{11x} \boxed{x+11}"),
    "2": (r"\boxed{2} or \boxed{3}", r"\boxed{x=2} or \boxed{x=-2}", r"\boxed{2} \boxed{2\sqrt{3}}"),
    "(1,2)": (r"\boxed{(2,1)} or \boxed{(1,2)}",),
    r"\frac13": (r"\boxed{0.33} or \boxed{\frac13}",),
}


def test_boxes_of_one_value_are_no_conflict_and_all_others_are(subtests):
    for boxes, expected in ((EQUAL_BOXES, "ok"), (OTHER_BOXES, "conflict")):
        for gold, texts in boxes.items():
            for text in texts:
                with subtests.test(text=text):
                    verdict = Math().score(Row(None, text, None, {"answer": gold}))
                    assert (verdict.value, verdict.status) == (float(expected == "ok"), expected)
