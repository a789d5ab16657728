"""Math on random text: always a bounded value, never an exception."""

import pytest

from trl_ext.rewards.rule import Row
from trl_ext.rewards.rules.maths import Math

pytest.importorskip("math_verify")
hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

PIECES = st.sampled_from(
    [
        *"0123456789xyzie(){}[]|,;=<>+-*/^_!.$%& \n'\"~\\",
        *r"\frac \sqrt \boxed{ \left \right \{ \} \pi \infty \pm \cup \in \leq \text{ \text{cm}".split(),
        *r"\begin{pmatrix} \end{pmatrix} \\ \sum_{i=1}^{3} \binom \sin \ln \log_2 \overline \lfloor \rfloor".split(),
        *r"^\circ \% \$ \( \)".split(),
        *"<think> </think> <answer> </answer> #### A: or and not 1,000 0.5 \u0663 \u200b \ud800 \x00 √".split(),
        *"² é 答案".split(),
        "the answer is ",
        " dollars",
    ]
)
SOUP = st.lists(PIECES, max_size=40).map("".join)
TEXT = st.one_of(SOUP, SOUP.map("so \\boxed{{{}}}".format), st.text(max_size=60))


@pytest.mark.slow
@hypothesis.given(text=TEXT, gold=st.one_of(SOUP, st.sampled_from(["3", r"\frac12", "(1,2)", "x=5", r"3\sqrt{13}"])))
def test_random_text_gets_a_bounded_value(text, gold):
    rule = Math()
    row = Row(text[::-1], text, None, {"answer": gold})
    verdict = rule.score(row)
    assert verdict.value in (0.0, 1.0) or (verdict.value is None and verdict.status in ("gold_invalid", "undecided"))
    assert verdict == rule.score(row)
    hash(rule.cache_key(row))
