"""pass@k is what counting all draws gives, and its interval holds it."""

from itertools import combinations
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_ext.cli.after.evaluation import BOOTSTRAP, WILSON, estimate, pass_at_k, powers_up_to, wilson


def test_pass_at_k_is_the_share_of_draws_with_a_right_sample_and_exact_for_many():
    for num in range(1, 8):
        for right in range(num + 1):
            samples = [True] * right + [False] * (num - right)
            for k in range(1, num + 1):
                draws = [any(draw) for draw in combinations(samples, k)]
                assert pass_at_k(num, right, k) == pytest.approx(fmean(draws), abs=1e-12), (num, right, k)
    assert pass_at_k(10_000, 1, 1) == pytest.approx(1e-4)
    assert pass_at_k(10_000, 1, 5_000) == pytest.approx(0.5)


def test_wilsons_interval_is_the_published_one_and_powers_end_with_the_number_of_samples():
    assert [powers_up_to(num) for num in (1, 2, 5, 8)] == [[1], [1, 2], [1, 2, 4, 5], [1, 2, 4, 8]]
    # Newcombe, Statistics in Medicine 17 (1998) 857, table I, method 3: 81 of 263, 15 of 148, 0 of 20, 1 of 29.
    for right, num, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611)):
        assert wilson(right / num, num) == pytest.approx((low, high), abs=5e-5)
    assert wilson(1 / 29, 29) == pytest.approx((0.0061, 0.1718), abs=5e-5)


def test_one_sample_a_problem_has_wilsons_interval_and_several_are_drawn_again():
    one = estimate([(1, 1)] * 12 + [(1, 0)] * 8, 1)
    assert one.value == 0.6 and one.method == WILSON and one.num_problems == 20
    many = estimate([(8, right) for right in (0, 2, 5, 8)] * 5, 1)
    assert many.method == BOOTSTRAP and many.value == pytest.approx(15 / 32)
    # The standard error of a mean of 20 shares, twice.
    error = 1.96 * np.std([0, 0.25, 0.625, 1]) / 20**0.5
    assert (many.low, many.high) == pytest.approx((15 / 32 - error, 15 / 32 + error), abs=0.02)


def test_problems_that_are_all_alike_are_not_certain_and_those_with_fewer_samples_than_k_do_not_count():
    for right in (0, 4):
        found = estimate([(4, right)] * 10, 2)
        assert found.method == WILSON and found.high - found.low > 0.2
    assert estimate([(4, 2), (1, 1)], 4).num_problems == 1
    assert estimate([(1, 1)], 2) is None


@given(st.lists(st.integers(1, 6).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), min_size=1, max_size=6))
def test_an_interval_holds_its_share(counts):
    found = estimate(counts, 1)
    assert 0 <= found.low <= found.value + 1e-12 and found.value - 1e-12 <= found.high <= 1
