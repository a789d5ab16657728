"""Charts: every value is in the picture, of long lines in a mean, and axes have round numbers."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trl_ext.monitor.pages.charts import MOST_POINTS, Line, line_chart, stacked_chart


def points(path):
    return [tuple(map(float, pair.split())) for pair in re.split("[MLZ]", path) if pair]


def chart(values, **others):
    return line_chart("Loss", "", [Line("loss", range(1, len(values) + 1), values, **others)])


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


def test_the_columns_of_a_stack_add_up():
    lines = [Line("a", range(1, 5), [1.0] * 4), Line("b", [1, 3], [3.0, 1.0])]
    picture = stacked_chart("Phases", "seconds", lines)
    one = (picture.bottom - next(y for y, label in picture.y_ticks if label == "2")) / 2
    top = [y for _, y in points(picture.strokes[1].path)][:8:2]
    assert [(picture.bottom - y) / one for y in top] == pytest.approx([4, 1, 2, 1], abs=0.05)


def test_a_stack_of_any_number_of_steps_is_as_wide_as_its_axes():
    for number in (1, 3, 1000):
        picture = stacked_chart("Phases", "", [Line("a", range(number), [1.0] * number)])
        places = [x for x, _ in points(picture.strokes[0].path)]
        assert min(places) == picture.left and max(places) == picture.width - picture.right, number


def test_axes_have_few_round_numbers():
    cases = {
        (0.0, 1.2): "0 0.5 1.0",
        (0.0, 0.0): "0 0.5 1.0",
        (10.0, 11.0): "10.0 10.5 11.0",
        (-2.0, 2.0): "-2 0 2",
        (0.0, 4e-5): "0 2e-05 4e-05",
        (0.0, 12_000.0): "0 5k 10k",
        (0.0, 3e6): "0 1M 2M 3M",
        (5.2881, 5.2883): "5.2880 5.2882 5.2884",
        (1.02e-5, 1.03e-5): "1.020e-05 1.025e-05 1.030e-05",
        (0.12345, 0.123451): "0.123445 0.123450 0.123455",
    }
    assert {values: " ".join(label for _, label in chart(values).y_ticks) for values in cases} == cases


def number(label):
    return float(label.replace(",", "").replace("k", "e3").replace("M", "e6"))


@given(st.floats(-1e9, 1e9).filter(lambda value: abs(value) > 1e-12), st.floats(-9, 0), st.booleans())
@example(5.2881, -4.5, False)
@example(1.02e-5, -2.0, True)
def test_labels_of_an_axis_differ_and_fit_beside_it(value, exponent, is_falling):
    other = value * (1 + 10**exponent * (-1 if is_falling else 1))
    picture = chart([value, other])
    labels = [label for _, label in picture.y_ticks]
    assert len(labels) >= 2 and len(set(map(number, labels))) == len(labels)
    assert max(map(len, labels)) <= 12 and 6.5 * max(map(len, labels)) + 6 <= picture.left


def test_an_outlier_turns_the_axis_logarithmic_and_says_so():
    picture = chart([1.0] * 9 + [1e6])
    assert picture.note == "logarithmic axis"
    assert [label for _, label in picture.y_ticks] == ["1", "100", "10000", "1e+06"]
    assert chart([0.0] * 9 + [1e6]).note == ""  # 0 has no logarithm


def test_many_lines_differ_and_nothing_is_no_chart():
    lines = [Line(str(hue), range(300), range(300), hue) for hue in range(24)]
    strokes = line_chart("Rewards", "", lines).strokes
    assert len({stroke.style for stroke in strokes}) == 24
    assert line_chart("Loss", "", [Line("loss", [], [])]) is None
    assert stacked_chart("Phases", "", []) is None
