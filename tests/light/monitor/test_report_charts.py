"""Charts: every value is in the picture, of long lines in a mean, and axes have round numbers."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trl_ext.monitor.pages.page import MOST_POINTS, Line, line_chart


def points(path):
    return [tuple(map(float, pair.split())) for pair in re.split("[MLZ]", path) if pair]


def chart(values, **others):
    return line_chart("Loss", [Line("loss", range(1, len(values) + 1), values, **others)])


def test_a_short_line_has_a_point_for_every_value_and_a_lone_one_within_the_axes():
    picture = chart([0.0, 1.0, 2.0])
    (stroke,) = picture.strokes
    assert points(stroke.path) == [(x, y) for x, y, _ in stroke.markers]
    assert [text for *_, text in stroke.markers] == ["loss, step 1: 0.00", "loss, step 2: 1.00", "loss, step 3: 2.00"]
    assert stroke.markers[0][1] == picture.bottom and stroke.markers[0][0] == picture.left
    picture = chart([0.5])
    ((x, y, _),) = picture.strokes[0].markers
    assert picture.left < x < picture.width - picture.right and 0 < y < picture.bottom
    assert [label for _, label in picture.x_ticks if label == "1"]


@pytest.mark.parametrize("length", [241, 250, 479, 5000])
def test_a_long_line_is_thinned_evenly(length):
    (stroke,) = chart([float(number % 7) for number in range(length)]).strokes
    assert len(points(stroke.path)) == MOST_POINTS and not stroke.markers


def test_a_thinned_line_ends_on_the_mean_of_as_many_values_as_the_others():
    values = [number % 2 for number in range(4801)]
    heights = [y for _, y in points(chart(values).strokes[0].path)]
    assert max(heights) - min(heights) < 0.1 * 190


def test_axes_have_few_round_numbers():
    cases = {
        (0.0, 1.2): "0 0.5 1",
        (0.0, 0.0): "0 0.5 1",
        (10.0, 11.0): "10 10.5 11",
        (-2.0, 2.0): "-2 0 2",
        (0.0, 4e-5): "0 2e-05 4e-05",
        (0.0, 12_000.0): "0 5000 10000",
        (5.2881, 5.2883): "5.288 5.2882 5.2884",
        (0.12345, 0.123451): "0.123445 0.12345 0.123455",
    }
    assert {values: " ".join(label for _, label in chart(values).y_ticks) for values in cases} == cases


@given(st.floats(-1e9, 1e9).filter(lambda value: abs(value) > 1e-12), st.floats(-9, 0), st.booleans())
@example(5.2881, -4.5, False)
@example(1.02e-5, -2.0, True)
def test_labels_of_an_axis_differ_and_fit_beside_it(value, exponent, is_falling):
    other = value * (1 + 10**exponent * (-1 if is_falling else 1))
    picture = chart([value, other])
    labels = [label for _, label in picture.y_ticks]
    assert len(labels) >= 2 and len(set(map(float, labels))) == len(labels)
    assert max(map(len, labels)) <= 12 and 6.5 * max(map(len, labels)) + 6 <= picture.left


def test_many_lines_differ_and_nothing_is_no_chart():
    lines = [Line(str(hue), range(300), range(300), hue) for hue in range(24)]
    strokes = line_chart("Rewards", lines).strokes
    assert len({stroke.style for stroke in strokes}) == 24
    assert line_chart("Loss", [Line("loss", [], [])]) is None
