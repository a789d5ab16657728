"""From a checkpoint that is damaged or of another run nobody resumes without a word: it is refused in one sentence, or
an older whole one is taken, and that is said.

Of each trainer's 70 to 100 cases a quarter is tried here, which PPO's critics share, and all with
`TRL_EXT_THOROUGH=1`.
"""

import pytest

from tests.faults.damaged import FILE
from tests.faults.starting import IS_THOROUGH, found_by

# First case, and every which.
CASES = {"grpo": (0, 4), "reward": (1, 4), "ppo_head": (2, 12), "ppo_separate": (6, 12), "ppo_adapter": (10, 12)}


@pytest.mark.parametrize("kind", CASES)
def test_a_damaged_or_foreign_checkpoint_is_refused_or_passed_over_in_words(kind, tmp_path):
    found = found_by("damaged", FILE, tmp_path / kind, kind, *((0, 1) if IS_THOROUGH else CASES[kind]))
    assert len(found) >= 5
    assert {name: fault for name, fault in found.items() if fault} == {}
