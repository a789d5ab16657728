"""Out of memory has an exit code of its own, from the process to the command."""

import pytest
import torch

from trl_ext.errors import OutOfMemoryError, TrlExtError
from trl_ext.launch.accelerate import _report_exit
from trl_ext.scripts.exit import OUT_OF_MEMORY, user_errors
from trl_ext.trainers.fit.message import out_of_memory_in_words


def ends(error: Exception) -> int:
    with pytest.raises(SystemExit) as caught, user_errors(), out_of_memory_in_words():
        raise error
    return caught.value.code


def test_the_exit_code_is_five():
    assert OUT_OF_MEMORY == 5
    assert ends(OutOfMemoryError("full")) == 5


def test_the_rank_that_ran_out_speaks_whichever_it_is(capsys, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    ends(OutOfMemoryError("Out of memory."))
    assert "error: Out of memory." in capsys.readouterr().err


def test_the_other_ranks_are_silent_and_end_alike(capsys):
    assert ends(OutOfMemoryError.of_another_rank()) == 5
    assert capsys.readouterr().err == ""


def test_what_a_model_that_loads_cannot_get_is_told_in_words(capsys):
    assert ends(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")) == 5
    told = capsys.readouterr().err
    assert "Out of memory outside the training step: CUDA out of memory." in told
    assert "Tried to allocate 2.00 GiB." in told
    assert "`trl-ext check RECIPE` shows what would fit" in told


def test_other_errors_keep_their_ends():
    assert ends(TrlExtError("a typo")) == 2
    with pytest.raises(RuntimeError, match="shape"), user_errors(), out_of_memory_in_words():
        raise RuntimeError("shape mismatch")


def test_the_command_passes_the_code_on_and_says_why(capsys):
    assert _report_exit(OUT_OF_MEMORY) == 5
    assert "a process ran out of memory" in capsys.readouterr().err
    assert _report_exit(-9) == 1
    killed = "stopped with exit code -9; it was killed, often because host memory was full. Continue with"
    assert killed in capsys.readouterr().err
    for code in (-15, 143):
        assert _report_exit(code) > 0
        ended = capsys.readouterr().err
        assert f"exit code {code}; it was ended by SIGTERM before it could save" in ended and "above" not in ended
    assert _report_exit(1) == 1 and "its output above gives the reason" in capsys.readouterr().err
