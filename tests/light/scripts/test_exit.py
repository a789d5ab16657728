"""A user's mistake is printed once whichever rank it is, in words where a library says it."""

import multiprocessing
import sys
from itertools import product

import pytest

from trl_ext.errors import ConfigError, OutOfMemoryError
from trl_ext.scripts.exit import refusals, user_errors


def ends(error, capsys):
    with pytest.raises(SystemExit) as stop, user_errors():
        raise error
    return stop.value.code, capsys.readouterr().err


# Ranks ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def rank(tmp_path, monkeypatch):
    """Become a local rank of a launch, as torch's launcher has it."""

    def become(number):
        folder = tmp_path / "none_x" / "attempt_0" / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        monkeypatch.setenv("LOCAL_RANK", str(number))
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(folder / "error.json"))

    return become


def test_the_same_sentence_is_printed_once_a_launch_and_one_of_its_own_by_every_rank(rank, capsys):
    printed = []
    for number in (1, 0, 2):
        rank(number)
        code, text = ends(ConfigError("beta=-1 must be at least 0."), capsys)
        assert code == 2
        printed.append(text.strip())
    assert printed == ["error: beta=-1 must be at least 0.", "", ""]
    for number in (0, 3):
        rank(number)
        assert (
            f"error: No rollouts of process {number}."
            in ends(ConfigError(f"No rollouts of process {number}."), capsys)[1]
        )


def test_without_torchs_launcher_every_process_prints(monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", "3")
    for error_file in (None, "", "/nowhere/attempt_0/3/error.json"):
        monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
        if error_file is not None:
            monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", error_file)
        assert "error: A slip." in ends(ConfigError("A slip."), capsys)[1]


def end_with_the_same_slip(number, barrier, out):
    sys.stderr = open(out, "a")
    barrier.wait()
    with user_errors():
        raise ConfigError("A slip.")


@pytest.mark.slow
def test_of_ranks_that_end_in_the_same_moment_one_prints(rank, tmp_path):
    rank(0)
    fork, out = multiprocessing.get_context("fork"), tmp_path / "stderr"
    barrier = fork.Barrier(8)
    processes = [fork.Process(target=end_with_the_same_slip, args=(i, barrier, str(out))) for i in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [2] * 8
    assert out.read_text().count("error: A slip.") == 1


# Libraries --------------------------------------------------------------------------------------------------------


def code_of(module, **names):
    """Return functions whose code is a module's: `fails` raises its argument, `from_pretrained` calls it."""
    names["__name__"] = module
    exec(  # the traceback's frames tell whose words an error has
        "def fails(error):\n    raise error\n"
        "def from_pretrained(pretrained_model_name_or_path, error):\n    fails(error)\n",
        names,
    )
    return names


@pytest.mark.slow  # refusals look for PyTorch's errors
def test_what_a_library_refuses_is_a_sentence_with_its_words(subtests):
    modules = ("transformers.trainer", "trl.trainer.grpo_trainer", "peft.config", "deepspeed.ops")
    for module, kind in product(modules, (ValueError, OSError, ImportError, TypeError, RuntimeError)):
        with subtests.test(module=module, kind=kind.__name__):
            with pytest.raises(ConfigError) as caught, refusals():
                code_of(module)["fails"](kind("Wrong\n - very wrong."))
            sentence = f"The run cannot start: Wrong - very wrong ({kind.__name__} in {module}, line 2)."
            assert str(caught.value) == sentence and isinstance(caught.value.__cause__, kind)


@pytest.mark.slow
def test_other_errors_go_on_as_they_are(subtests):
    for module, error in (
        ("trl_ext.trainers.base.packing", ValueError("our own bug")),
        ("my_rewards", ValueError("the user's code")),
        ("transformers.trainer", KeyError("nothing that a library says on purpose")),
        ("torch.distributed", RuntimeError("Connection closed by peer")),
        ("transformers.trainer", RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")),
        ("trl_ext.errors", OutOfMemoryError("full")),
    ):
        with subtests.test(module=module, error=str(error)):
            with pytest.raises(type(error)) as caught, refusals():
                code_of(module)["fails"](error)
            assert caught.value is error
    # Nothing is changed once the first step has begun.
    with pytest.raises(ValueError, match="late"), refusals(has_begun=lambda: True):
        code_of("transformers.trainer")["fails"](ValueError("late"))
    # Nothing is changed once the first step has begun.
    with pytest.raises(ValueError, match="late"), refusals(has_begun=lambda: True):
        code_of("transformers.trainer")["fails"](ValueError("late"))


@pytest.mark.slow
def test_what_comes_from_loading_a_model_names_its_folder_and_json_counts_for_who_called_it():
    for error in (ValueError("no config"), KeyError("hidden_size"), RuntimeError("file is truncated")):
        with pytest.raises(ConfigError, match=r"^models/tiny cannot be loaded: .*in transformers.auto"), refusals():
            code_of("transformers.auto")["from_pretrained"]("models/tiny", error)
    import json

    names = code_of("accelerate.utils", json=json)
    exec("def reads():\n    json.loads('{')\n", names)
    with pytest.raises(ConfigError, match=r"JSONDecodeError in accelerate.utils, line 2"), refusals():
        names["reads"]()
