"""Launch files for cards gather over gloo as accelerate does on cards (`programs/gather_of_cards.py`)."""

import json
import subprocess

from tests.multi.launching import PROGRAMS, TIMEOUT_S, environment, launched


def test_what_works_over_gloo_alone_is_refused(tmp_path):
    file = tmp_path / "facts.json"
    command = list(map(str, [*launched("multi_gpu", 2), PROGRAMS / "gather_worker.py", file]))
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr[-3000:]
    facts = json.loads(file.read_text())
    assert facts["number"] == [0, 1]
    assert facts["columns"] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert facts["no rows"] == []
    assert "cannot reshape tensor of 0 elements into shape [-1, 0]" in facts["no columns"]
    assert facts["dtype"] == "TypeError: NCCL has no torch.int16."
    assert "DistributedOperationException" in facts["shapes"]
