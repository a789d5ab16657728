"""Writing to standard output and error raises nothing and leaves the exit code alone; each case is a process."""

import os
import subprocess
import sys
import time
from io import StringIO, TextIOWrapper

import pytest

from trl_ext.monitor.streams import ignore_failed_writes

BEGIN = "import sys; from trl_ext.monitor.streams import ignore_failed_writes; ignore_failed_writes()\n"
SAYS = """
class Late:
    def __del__(self):
        print("while Python goes down")
sys.kept = Late()
print("a first line", flush=True)
print("x" * 100_000)
sys.stdout.buffer.write(b"bytes")
print("an error", file=sys.stderr)
print("left for the last flush", end="")
"""


def run(program: str, *options: str, stdout, stderr=subprocess.PIPE, **variables: str):
    command = [sys.executable, *options, "-c", BEGIN + program]
    variables |= {"PYTHONUNBUFFERED": ""}
    return subprocess.run(command, stdout=stdout, stderr=stderr, env=os.environ | variables, timeout=60)


@pytest.fixture
def pipe_without_reader():
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@pytest.mark.parametrize("options", [(), ("-u",)], ids=["buffered", "unbuffered"])
def test_a_program_without_a_reader_ends_well_and_still_says_its_errors(pipe_without_reader, options):
    done = run(SAYS, *options, stdout=pipe_without_reader)
    assert (done.returncode, done.stderr) == (0, b"an error\n")


def test_a_program_ends_well_where_nobody_reads_its_errors_either(pipe_without_reader):
    assert run(SAYS, stdout=pipe_without_reader, stderr=pipe_without_reader).returncode == 0


def test_a_program_ends_well_where_the_disk_of_its_log_is_full():
    with open("/dev/full", "wb") as full:
        assert run(SAYS, stdout=full, stderr=full).returncode == 0


def test_a_child_that_starts_later_has_the_null_device(pipe_without_reader):
    program = "print(1, flush=True); import os; print(os.path.realpath('/proc/self/fd/1'), file=sys.stderr)"
    assert run(program, stdout=pipe_without_reader).stderr == b"/dev/null\n"


def test_a_letter_that_the_encoding_lacks_is_escaped():
    said = run("print('r\\xe9sum\\xe9 \\udcff')", stdout=subprocess.PIPE, PYTHONIOENCODING="ascii").stdout
    assert said == b"r\\xe9sum\\xe9 \\udcff\n"


def test_all_arrives_where_a_pipe_does_not_block_and_its_reader_is_slow():
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    process = subprocess.Popen([sys.executable, "-c", BEGIN + "print('x' * 300_000)"], stdout=writer)
    os.close(writer)
    time.sleep(0.2)  # the pipe is full by then
    with open(reader, "rb") as file:
        assert len(file.read()) == 300_001
    assert process.wait(60) == 0


def test_a_notebooks_stream_and_a_file_stay_as_they_are(monkeypatch, tmp_path):
    with (tmp_path / "file").open("w") as file:
        monkeypatch.setattr(sys, "stdout", StringIO())
        monkeypatch.setattr(sys, "stderr", file)
        ignore_failed_writes()
        assert isinstance(file, TextIOWrapper)
        assert "write" not in vars(file.buffer.raw) and file.errors == "strict"


def test_calling_it_twice_changes_nothing_more():
    program = "first = vars(sys.stdout.buffer.raw)['write']; ignore_failed_writes()\n"
    program += "print(sys.stdout.buffer.raw.write is first)"
    assert run(program, stdout=subprocess.PIPE).stdout == b"True\n"
