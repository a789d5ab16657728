"""NaN on one of two processes ends both with one sentence and whole weights; DDP and ZeRO-3 in `make test`."""

import pytest

from tests.faults.starting import IS_THOROUGH
from tests.multi.launching import PROGRAMS, YAMLS, facts_of, launched, skip_what_cannot_run

NAMES = [name for name in YAMLS if name.startswith(("cpu", "zero"))] if IS_THOROUGH else ["cpu", "zero3"]


@pytest.mark.parametrize("max_grad_norm", [0.5, 0.0] if IS_THOROUGH else [0.0])
@pytest.mark.parametrize("name", NAMES)
def test_nan_on_one_process_leaves_the_weights_of_both_whole(name, max_grad_norm, tiny_model, tmp_path):
    skip_what_cannot_run(name)
    worker, options = PROGRAMS / "diverging_worker.py", ("--packing", "--max_grad_norm", max_grad_norm)
    facts = facts_of(worker, launched(name, 2), tiny_model, tmp_path / "out", 2, *options)
    first, second = facts["sentences"]
    assert first == second and " in step 2, at a learning rate of 0.01. A step by it destroys the weights" in first
    assert "The last whole checkpoint is checkpoint-1." in first
    assert facts["difference"] == 0.0 and facts["moved"] > 1e-4
