"""Launch files for cards gather over gloo as accelerate does on cards (`programs/gather_of_cards.py`)."""

from tests.multi.launching import run_job


def test_what_works_over_gloo_alone_is_refused(tmp_path):
    facts = run_job("gather", "multi_gpu", tmp_path).facts
    assert facts["number"] == [0, 1]
    assert facts["columns"] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert facts["no rows"] == []
    assert "cannot reshape tensor of 0 elements into shape [-1, 0]" in facts["no columns"]
    assert facts["dtype"] == "TypeError: NCCL has no torch.int16."
    assert "DistributedOperationException" in facts["shapes"]
