"""What a failed forward wrote is taken back."""

from types import SimpleNamespace

from trl_ext.trainers.fit.oom.rollback import StepRollback
from trl_ext.trainers.forward.token_counts import TokenCounts


def test_everything_since_the_mark_is_taken_back():
    subject = SimpleNamespace(_tokens=TokenCounts(), _step_stats=[1])
    subject._tokens.add(1, 2, 3)
    mark = StepRollback(subject)
    subject._tokens.add(10, 20, 30)
    subject._step_stats.append(2)
    mark.roll_back()
    assert subject._tokens._counts == [1, 2, 3]
    assert subject._step_stats == [1]
