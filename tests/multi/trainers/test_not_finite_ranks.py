"""NaN on one of two processes ends both with one sentence and whole weights; DDP and ZeRO-3 in `make test`."""

import pytest

from tests.multi.launching import YAMLS, run_job, skip_what_cannot_run
from tests.nightly import daily

NAMES = [name for name in YAMLS if name.startswith(("cpu", "zero"))]


@pytest.mark.parametrize("max_grad_norm", daily([0.5, 0.0], 0.0))
@pytest.mark.parametrize("name", daily(NAMES, "cpu", "zero3"))
def test_nan_on_one_process_leaves_the_weights_of_both_whole(name, max_grad_norm, tiny_model, tmp_path):
    skip_what_cannot_run(name)
    run = run_job("diverging", name, tmp_path, model=tiny_model, max_grad_norm=max_grad_norm)
    first, second = (said["said"] for said in run.ranks)
    assert first == second and " in step 2, at a learning rate of 0.01. A step by it destroys the weights" in first
    assert "The last whole checkpoint is checkpoint-1." in first
    assert run.facts["difference"] == 0.0 and run.facts["moved"] > 1e-4
