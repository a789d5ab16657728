r"""Mathematics in plain text (`2sqrt(3)`, `3 pi`): the time of reading it."""

import pytest

from tests.processor_time import timed
from trl_ext.rewards import Answer, Math, Row


@pytest.mark.parametrize("piece", ["2sqrt(", "sqrt(3) + ", "2 sin ", "root of ", "5 factorial ", "1/e "])
def test_reading_it_takes_time_linear_in_the_text(piece):
    row = Row(None, piece * (60_000 // len(piece)), None, {"answer": "42"})
    assert timed(lambda: [rule.score(row) for rule in (Answer(), Math())])[1] < 1.0
