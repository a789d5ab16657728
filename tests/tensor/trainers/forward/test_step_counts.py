"""What a failed forward wrote is taken back."""

from trl_ext.trainers.step.settings import StepCounts


def test_everything_since_the_mark_is_taken_back():
    counts = StepCounts()
    counts.add(1, 2, 3)
    counts.samples.append(1)
    mark = counts.mark()
    counts.add(10, 20, 30)
    counts.samples.append(2)
    counts.roll_back(mark)
    assert counts.mark() == mark == ((1, 2, 3), 1)
    assert counts.samples == [1]
