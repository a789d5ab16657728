"""What libraries say of their own defaults is left out, and the rest stays."""

import logging

import pytest

from trl_ext.compat.deepspeed import announce_builds
from trl_ext.scripts.process import quiet_launcher


def test_the_launchers_banner_is_left_out_and_other_warnings_stay(caplog):
    quiet_launcher()
    logger = logging.getLogger("torch.distributed.run")
    with caplog.at_level("WARNING", logger="torch.distributed.run"):
        logger.warning("\n***\nSetting OMP_NUM_THREADS environment variable for each process to be %s", 1)
        logger.warning("node_rank is ignored")
    assert [record.getMessage() for record in caplog.records] == ["node_rank is ignored"]


def test_a_helper_that_is_compiled_is_announced_once_a_machine_and_one_that_is_there_is_not(
    capsys, monkeypatch, tmp_path
):
    builder = pytest.importorskip("deepspeed.ops.op_builder.builder").OpBuilder
    loaded = []

    def jit_load(self, verbose=True):
        loaded.append(self.name)

    monkeypatch.setattr(builder, "jit_load", jit_load)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    announce_builds()
    announce_builds()
    helper = type("Helper", (), {"name": "cpu_adam", "load": lambda self: builder.jit_load(self)})()
    for rank in ("1", "0"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        helper.load()
    (tmp_path / "cpu_adam" / "cpu_adam.so").touch()
    helper.load()
    assert loaded == ["cpu_adam"] * 3
    said = "DeepSpeed compiles its helper 'cpu_adam', once for this machine: it may take minutes.\n"
    assert capsys.readouterr().err == said
