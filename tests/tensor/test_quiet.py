"""What libraries say of their own defaults is left out, and the rest stays."""

import importlib
import logging

import pytest

from trl_ext.compat.deepspeed import announce_builds
from trl_ext.scripts.quiet import quiet_deepspeed, quiet_launcher


def test_deepspeeds_notice_of_a_build_is_left_out(capsys, monkeypatch):
    pytest.importorskip("deepspeed")
    backend = importlib.import_module("deepspeed.comm.torch")
    monkeypatch.setattr(backend, "print", print, raising=False)  # taken back after the test
    quiet_deepspeed()
    capsys.readouterr()
    exec("print('built')", vars(backend))
    assert capsys.readouterr().out == ""
    import torch

    assert not hasattr(torch, "print")


def test_the_launchers_banner_is_left_out_and_other_warnings_stay(caplog):
    quiet_launcher()
    logger = logging.getLogger("torch.distributed.run")
    with caplog.at_level("WARNING", logger="torch.distributed.run"):
        logger.warning("\n***\nSetting OMP_NUM_THREADS environment variable for each process to be %s", 1)
        logger.warning("node_rank is ignored")
    assert [record.getMessage() for record in caplog.records] == ["node_rank is ignored"]


def test_no_accelerator_is_news_only_where_there_is_one(caplog, monkeypatch):
    quiet_launcher()
    logger = logging.getLogger("DeepSpeed")
    monkeypatch.setattr(logger, "propagate", True)
    for is_there in (False, True):
        monkeypatch.setattr("torch.accelerator.is_available", lambda is_there=is_there: is_there)
        caplog.clear()
        logger.warning("Setting accelerator to CPU. If you have GPU, we were unable to detect it.")
        assert bool(caplog.records) == is_there


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
