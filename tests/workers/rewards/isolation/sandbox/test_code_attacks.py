"""Code: no trick earns anything, every limit holds in time, and nothing is left behind."""

import glob
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy
import pytest

from trl_ext.rewards.base.rule import Row, Verdict
from trl_ext.rewards.isolation.sandbox import api as sandbox
from trl_ext.rewards.rules.code import Code

SECRET = "expected-7394512"
SITE = str(Path(numpy.__file__).parents[1])
STDIO = [{"input": "7", "output": f"{SECRET}\n1\n2"}]
CALLS = ["assert f(7) == 'expected-7394512'", "assert f(8) == [1, 2]"]
RESULTS = {"fn_name": "f", "inputs": [[7], [8]], "outputs": [SECRET, [1, 2]]}
TESTS = {"stdio": STDIO, "asserts": CALLS, "calls": RESULTS}
CPU_S = 0.3
HANG_S = 30  # a program that nothing stops goes on for 60


def judged(code: str, mode: str = "stdio", **fields: object) -> Verdict:
    rule = Code(mode="asserts" if mode == "asserts" else "stdio", **({"cpu_s": CPU_S, "memory_mib": 256} | fields))
    row = Row(None, f"```python\n{code}\n```", None, {"tests": TESTS[mode]})
    started = time.monotonic()
    verdict = rule.score(row)
    assert time.monotonic() - started < HANG_S
    return verdict


def children(of: int | None = None) -> set[int]:
    """Ids of all processes below this one, or another."""
    parents = {}
    for path in glob.glob("/proc/[0-9]*/stat"):
        try:
            with open(path, "rb") as file:
                parents[int(path.split("/")[2])] = int(file.read().rpartition(b")")[2].split()[1])
        except OSError:
            continue
    found, fresh = set(), {of or os.getpid()}
    while fresh:
        fresh = {pid for pid, parent in parents.items() if parent in fresh}
        found |= fresh
    return found


EVERYWHERE = {
    "no code": "",
    "returns None": "def f(x):\n    return None",
    "exits": "import sys\nsys.exit(0)",
    "exits hard": "import os\nos._exit(0)",
    "exits hard in the call": "def f(x):\n    import os\n    os._exit(0)",
    "exits in the call": "def f(x):\n    raise SystemExit(0)",
    "exits at exit": "import atexit, os\natexit.register(os._exit, 0)",
    "interrupts": "def f(x):\n    raise KeyboardInterrupt",
    "kills itself": "import os\nos.kill(os.getpid(), 9)",
    "prefix": f"print({SECRET!r})",
    "more than is due": f"print({SECRET!r}, 1, 2, 3, sep='\\n')",
    "all guesses": "for i in range(2000): print(f'expected-{i}')",
    "equal to everything": (
        "class E(str):\n    def __eq__(s, o): return True\n    def __ne__(s, o): return False\n"
        "    __hash__ = str.__hash__\n    def __str__(s): return s\ndef f(x):\n    return E()"
    ),
    "an object equal to everything": (
        "class E:\n    def __getattr__(s, n): return s\n    def __eq__(s, o): return True\n"
        "    def __ne__(s, o): return False\n    def __call__(s, *a): return s\n    def __bool__(s): return True\n"
        "f = E()"
    ),
    "a list equal to everything": "class L(list):\n    def __eq__(s, o): return True\ndef f(x):\n    return L()",
    "patched builtins": (
        "import builtins, sys\nbuiltins.AssertionError = type('A', (BaseException,), {})\n"
        "builtins.print = lambda *a, **k: None\nbuiltins.all = builtins.isinstance = lambda *a: True\n"
        "builtins.__build_class__ = None\nsys.excepthook = lambda *a: None\ndef f(x):\n    return True"
    ),
    "patched json": "import json\njson.dumps = lambda *a, **k: '{\"value\": true}'\njson.loads = lambda *a: {}",
    "patched harness": (
        "import sys\nfor m in list(sys.modules.values()):\n"
        "    for n in ('run_judge', 'failure_of', 'decode', 'encode', 'Channel', 'RemoteObject'):\n"
        "        if hasattr(m, n): setattr(m, n, lambda *a, **k: '')\ndef f(x):\n    return 1"
    ),
    "prints a result": f"import json, os\ndef f(x):\n    print(json.dumps({SECRET!r}))\n    os._exit(0)",
    "reads the caller": (
        "import sys, gc\ndef f(x):\n    frame, found = sys._getframe(), []\n    while frame:\n"
        "        found.append(repr(frame.f_locals)[:20000]); frame = frame.f_back\n"
        "    return next((w for t in found for w in t.split('\\'') if w.startswith('expected-')), None)"
    ),
    "a report of its own": (
        "import os\nfor fd in range(256):\n    for text in (b'[2, \"\", false]', b'{\"value\": true}', b'1'):\n"
        "        try: os.write(fd, text)\n        except OSError: pass\n"
    ),
    "answers before it is asked": (
        "import json, os, struct\ndata = json.dumps({'value': True}).encode()\n"
        "for _ in range(50): os.write(3, struct.pack('<I', len(data)) + data)\ndef f(x):\n    return True"
    ),
    "contents that nobody asked for": (
        "import json, os, struct\nd = {'value': ['shared', [['mine', 0], ['list', [1, 2]]]], 'changed': []}\n"
        "d['changed'] = [[n, ['list', []]] for n in range(9)]\ndata = json.dumps(d).encode()\n"
        "for _ in range(50): os.write(3, struct.pack('<I', len(data)) + data)\ndef f(x):\n    return True"
    ),
    "a text of its own class": "class E(str):\n    __str__ = __repr__ = lambda s: 'x'\ndef f(x):\n    return E()",
    "a number of its own class": "class E(int):\n    __hash__ = __index__ = lambda s: 0\ndef f(x):\n    return E(7)",
    "a coroutine": "async def f(x):\n    return x",
    "a message that never ends": "import os, struct\nos.write(3, struct.pack('<I', 2**22) + b'[' * 1000)",
    "a nested message": "import os, struct\nd = b'[' * 10**5\nos.write(3, struct.pack('<I', len(d)) + d)",
    "asks the tests back": (
        "import sys\nfrom trl_ext.rewards.isolation.sandbox.channel import RemoteObject\nframe = sys._getframe()\n"
        "while frame: frame.f_locals; frame = frame.f_back\n"
        "import gc\nfor o in gc.get_objects():\n    if type(o).__name__ == 'Channel':\n"
        "        print(o.look_up('scope')); print(o.ask('attribute', 0, '__globals__'))"
    ),
    "finds the tests in memory": (
        "import gc\nfor o in gc.get_objects():\n    if 'expected-' + '7394' in repr(o): print(repr(o))"
    ),
    "reads memory by address": (
        "import ctypes, re\nfor line in open('/proc/self/maps'):\n"
        "    a, b = (int(x, 16) for x in line.split()[0].split('-'))\n    ctypes.string_at(a, b - a)"
    ),
    "finds tests in /proc": (
        "import glob, re\n"
        "for p in [*glob.glob('/proc/*/cmdline'), *glob.glob('/proc/*/environ'), *glob.glob('/proc/*/fd/*')]:\n"
        "    try: print(re.findall(rb'expected-\\d+', open(p, 'rb').read()))\n    except OSError: pass"
    ),
    "reads the trainer's memory": f"print(open('/proc/{os.getpid()}/maps').read())",
    "a thread that prints later": "import threading, time\nthreading.Thread(target=lambda: print('x')).start()",
    "output behind the end": "import atexit\natexit.register(print, 'x')",
    "closes its output": "import os\nos.close(1)\nos.close(0)",
    "drops the stack": "import sys\nsys.setrecursionlimit(10**9)\ndef f(x): return f(x)\nf(1)",
    "crashes": "import ctypes\nctypes.string_at(0)",
    "deep source": "(" * 5000,
    "long line": "x = " + "+".join(["1"] * 40_000),
    "huge number": "def f(x):\n    return 10 ** 10 ** 5",
    "huge value": "def f(x):\n    return 'x' * 10 ** 7",
    "endless iterator": "import itertools\ndef f(x):\n    return itertools.count()",
    "a value within itself": "def f(x):\n    l = []\n    l.append(l)\n    return l",
    "a deep value": "def f(x):\n    l = []\n    for _ in range(10**5): l = [l]\n    return l",
}
SHUT = {  # From level 1 on: each prints FORBIDDEN and then fails, or what it reached.
    "fork": "import os\nos.fork()",
    "new program": "import os\nos.execv('/bin/true', ['true'])",
    "shell": "import os\nassert os.system('true') == 0",
    "subprocess": "import subprocess\nsubprocess.run(['true'])",
    "socket": "import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=1)",
    "unix socket": "import socket\nsocket.socket(socket.AF_UNIX)",
    "message to a unix socket": (
        "import socket\na, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        "a.sendto(b'x', '{folder}/listens')"
    ),
    "write outside": "open('{folder}/written', 'w').write('x')",
    "write here": "open('written', 'w').write('x')",
    "append": "open('{folder}/there', 'a').write('x')",
    "truncate": "import os\nos.truncate('{folder}/there', 0)",
    "delete": "import os\nos.remove('{folder}/there')",
    "rename": "import os\nos.rename('{folder}/there', '{folder}/gone')",
    "make a folder": "import os\nos.mkdir('{folder}/made')",
    "make a link": "import os\nos.symlink('/', '{folder}/link')",
    "change rights": "import os\nos.chmod('{folder}/there', 0)",
    "read a file": "open('{folder}/there').read()",
    "list a folder": "import os\nos.listdir('{folder}')",
    "read passwords": "open('/etc/passwd').read()",
    "read /proc": "open('/proc/self/status').read()",
    "read the trainer's environment": "open('/proc/{pid}/environ', 'rb').read()",
    "signal the trainer": "import os\nos.kill({pid}, 0)",
    "signal its server": "import os\nos.kill(os.getppid(), 9)",
    "signal all": "import os\nos.kill(-1, 0)",
    "signal its group": "import os\nos.killpg({pid}, 0)",
    "signal through a descriptor": "import fcntl\nfcntl.fcntl(1, fcntl.F_SETOWN, {pid})",
    "choose that signal": "import fcntl\nfcntl.fcntl(1, 10, 9)",
    "trace": "import ctypes\nassert ctypes.CDLL(None).ptrace(16, {pid}, 0, 0) == 0",
    "read by system call": (
        "import ctypes\nassert ctypes.CDLL(None, use_errno=True).syscall(310, {pid}, 0, 0, 0, 0, 0) != -1"
    ),
    "io_uring": "import ctypes\nassert ctypes.CDLL(None).syscall(425, 1, 0) != -1",
    "mount": "import ctypes\nassert ctypes.CDLL(None).mount(b'none', b'/mnt', b'tmpfs', 0, None) == 0",
    "new namespaces": "import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == 0",
    "raise limits": "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (100, 100))",
    "become another user": "import os\nos.setuid(1)",
    "leave the group": "import os\nos.setsid()",
    "memory file": "import os\nos.memfd_create('x')",
    "shared memory": "from multiprocessing import shared_memory\nshared_memory.SharedMemory(create=True, size=10)",
    "processes": "import multiprocessing as m\np = m.get_context('fork').Process(target=print)\np.start()",
    "x32 call": "import ctypes\nassert ctypes.CDLL(None).syscall(0x40000000 + 39) != -1",
}


@pytest.mark.parametrize("mode", TESTS)
@pytest.mark.parametrize("trick", EVERYWHERE)
def test_no_trick_earns_anything(trick, mode):
    assert judged(EVERYWHERE[trick], mode).value == 0.0


@pytest.fixture(scope="module")
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def needs_level(level: int) -> None:
    """Skip the test on a machine with a lower level; the reason names the setting that refuses user namespaces."""
    found, trouble = sandbox.sandbox_level()
    if found < level:
        pytest.skip(f"this machine has sandbox level {found}, not {level} ({trouble})")


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("deed", SHUT)
def test_the_sandbox_forbids(deed, level, listener, tmp_path):
    needs_level(level)
    (tmp_path / "there").write_text("secret")
    before = sorted(os.listdir(tmp_path))
    code = SHUT[deed].replace("{port}", str(listener)).replace("{folder}", str(tmp_path))
    code = code.replace("{pid}", str(os.getpid()))
    outcome = sandbox.run_program(f"{code}\nprint('DONE')".encode(), b"", sandbox.JobLimits(1.0, 256, 1024), level)
    assert b"DONE" not in outcome.output and outcome.code != 0, outcome
    assert sorted(os.listdir(tmp_path)) == before and (tmp_path / "there").read_text() == "secret"


SHUT_WITH_NUMPY = SHUT | {
    "read by NumPy": "numpy.fromfile('{folder}/there', numpy.uint8)",
    "map by NumPy": "numpy.memmap('{folder}/there', mode='r')",
    "write by NumPy": "numpy.zeros(3).tofile('{folder}/written')",
    "load what it links to": "numpy.ctypeslib.load_library('_C', '{site}/torch')",
    "another package": "import sys\nsys.path.append('{site}')\nimport packaging",
    "a file of another package": "open('{site}/packaging/__init__.py').read()",
    "list the packages": "import os\nos.listdir('{site}')",
}


@pytest.mark.parametrize("deed", SHUT_WITH_NUMPY)
def test_the_sandbox_forbids_it_with_numpy(deed, listener, tmp_path):
    needs_level(1)
    (tmp_path / "there").write_text("secret")
    code = SHUT_WITH_NUMPY[deed].replace("{port}", str(listener)).replace("{folder}", str(tmp_path))
    code = code.replace("{pid}", str(os.getpid())).replace("{site}", SITE)
    limits = sandbox.JobLimits(1.0, 256, 1024, SITE)
    outcome = sandbox.run_program(f"import numpy\nprint('THERE')\n{code}\nprint('DONE')".encode(), b"", limits)
    assert outcome.code != 0 and b"DONE" not in outcome.output, outcome
    assert outcome.ended == "exit" and (b"THERE" in outcome.output or outcome.code < 0), outcome
    assert os.listdir(tmp_path) == ["there"] and (tmp_path / "there").read_text() == "secret"


@pytest.mark.parametrize("trick", EVERYWHERE)
def test_no_trick_earns_anything_with_numpy(trick):
    assert judged(EVERYWHERE[trick], "asserts", numpy=True).value == 0.0


@pytest.mark.parametrize(
    ("code", "ended"),
    [
        ("x = numpy.ones((600, 600))\nwhile True: x @ x", "cpu"),
        ("import time\ntime.sleep(60)", "wall"),
        ("x = []\nwhile True: x.append(numpy.ones(2**17))", "exit"),
        ("numpy.ones(2**40)", "exit"),
        ("while True: print(numpy.arange(100))", "output"),
    ],
)
def test_a_limit_holds_with_numpy(code, ended):
    cpu_s = 1.0 if ended == "exit" else CPU_S  # on a busy machine memory is filled slowly
    outcome = sandbox.run_program(f"import numpy\n{code}".encode(), b"", sandbox.JobLimits(cpu_s, 256, 65536, SITE))
    assert outcome.ended == ended and (ended != "exit" or "Memory" in outcome.note), outcome
    assert outcome.cpu_s < 2 * cpu_s


@pytest.mark.parametrize("level", [0, 1, 2])
def test_no_secret_of_the_environment_is_there(level, monkeypatch):
    needs_level(level)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    code = b"import os\nprint(dict(os.environ), len(os.environ))"
    assert sandbox.run_program(code, b"", sandbox.JobLimits(1.0, 256, 1024), level).output == b"{} 0\n"


@pytest.mark.parametrize("level", [0, 1, 2])
def test_no_descriptor_but_the_programs_own_is_open(level):
    needs_level(level)
    code = b"import os\nfor n in range(300):\n    try: os.fstat(n); print(n)\n    except OSError: pass"
    outcome = sandbox.run_program(code, b"", sandbox.JobLimits(1.0, 256, 1024), level)
    assert outcome.output.split() == [b"0", b"1", b"2", b"5"]


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize(
    ("code", "ended"),
    [
        ("while True: pass", "cpu"),
        ("import signal\nsignal.signal(24, signal.SIG_IGN)\nwhile True: pass", "cpu"),
        ("import threading\nfor _ in range(3): threading.Thread(target=lambda: exec('while 1: pass')).start()", "cpu"),
        ("import time\ntime.sleep(60)", "wall"),
        ("try:\n    while True: pass\nexcept BaseException: pass\nfinally:\n    while True: pass", "cpu"),
        ("while True: print('x' * 1000)", "output"),
        ("import os\nwhile True: os.write(1, b'x' * 10**6)", "output"),
        ("x = bytearray(10 * 2**30)", "exit"),
        ("x = []\nwhile True: x.append(bytearray(2**20))", "exit"),
        ("x = 10 ** 10 ** 8", "cpu"),
    ],
)
def test_a_limit_holds_in_time(code, ended, level):
    needs_level(level)
    if level == 0 and "threading" in code and os.getuid():
        pytest.skip("level 0 has no threads for ordinary users")
    started = time.monotonic()
    outcome = sandbox.run_program(code.encode(), b"", sandbox.JobLimits(CPU_S, 96, 65536), level)
    assert outcome.ended == ended
    # By the clock it takes longer where others use the processor.
    assert outcome.cpu_s < 2 * CPU_S
    assert time.monotonic() - started < HANG_S
    assert len(outcome.output) <= 65536 + 2**16


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize(
    "code",
    [
        "import os\nfor _ in range(20):\n    try: os.fork()\n    except OSError: pass\nos._exit(0)",
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(60)\nprint('x')",
        "import os, time\npid = os.fork()\nif pid == 0:\n    time.sleep(0.2)\n    print('later')",
    ],
)
def test_no_process_is_left(code, level):
    needs_level(level)
    limits = sandbox.JobLimits(CPU_S, 256, 65536)
    sandbox.run_program(b"", b"", limits, level)
    before = children()
    if code.startswith("import os\nfor") and level == 0:
        code = code.replace("20", "5")  # Nothing but the limit on processes, which root has not, stops it there.
    outcome = sandbox.run_program(code.encode(), b"", limits, level)
    assert b"later" not in outcome.output
    assert children() == before


def test_a_fork_bomb_goes_nowhere():
    needs_level(1)
    code = b"import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    before = children() | {0}
    outcome = sandbox.run_program(code, b"", sandbox.JobLimits(CPU_S, 256, 65536))
    assert outcome.ended == "cpu" and len(children()) <= len(before) + 2


def test_level_0_leaves_no_folder_and_no_file(tmp_path):
    limits = sandbox.JobLimits(1.0, 256, 65536)
    write = b"import os\nopen('a', 'w').write('x')\nos.makedirs('b/c')\nos.symlink('/', 'd')\nprint(os.getcwd())"
    folder = sandbox.run_program(write, b"", limits, 0).output.decode().strip()
    listed = sandbox.run_program(b"import os\nprint(os.listdir())", b"", limits, 0).output
    assert listed == b"[]\n"
    sandbox._close_all()
    assert not os.path.exists(folder)


def test_a_server_that_a_program_kills_costs_the_program_its_reward_and_nobody_else():
    code = b"import os\nos.kill(os.getppid(), 9)\nprint('x')"
    limits = sandbox.JobLimits(CPU_S, 256, 65536)
    folders = set(glob.glob(f"{tempfile.gettempdir()}/sandbox-*"))
    sandbox._close_all()
    assert sandbox.run_program(code, b"", limits, 0).ended == "lost"
    assert set(glob.glob(f"{tempfile.gettempdir()}/sandbox-*")) <= folders
    assert sandbox.run_program(b"print(1)", b"", limits, 0).output == b"1\n"


def test_a_level_that_the_machine_lacks_refuses_the_rule(monkeypatch):
    monkeypatch.setattr("trl_ext.rewards.isolation.sandbox.api.sandbox_level", lambda **_: (0, "seccomp: no"))
    with pytest.raises(ValueError, match="require is L1, and this machine gives L0 \\(seccomp: no\\)"):
        Code()
    assert Code(require="L0").require == "L0"


def test_a_machine_that_cannot_start_a_process_gives_no_value(monkeypatch):
    rule = Code()
    row = Row(None, "```python\nprint(1)\n```", None, {"tests": [{"input": "", "output": "1"}]})

    def refuse(*_: object) -> None:
        raise sandbox.SandboxTrouble("The sandbox does not start: no room")

    monkeypatch.setattr("trl_ext.rewards.isolation.sandbox.api.run_program", refuse)
    assert rule.score(row) == Verdict(None, "infra_error", "The sandbox does not start: no room")


def test_the_tests_of_a_suite_are_not_in_the_candidates_memory():
    needs_level(1)
    code = b"import gc\ndef f(x):\n    return repr(gc.get_objects()).count(''.join(['expected-', '7394512']))"
    steps = [["assert f(7) == 0", "test"], ["assert f(8) != 'expected-7394512'", "test"]]
    job = json.dumps({"steps": steps, "names": {"f": "f"}, "modules": [], "all": True}).encode()
    outcome = sandbox.run_tests(code, job, sandbox.JobLimits(CPU_S * 3, 512, 65536))
    assert json.loads(outcome.output)[0] == 2, outcome


def test_nothing_outlives_a_trainer_that_is_killed():
    script = (
        "import sys\nsys.path[:] = {path!r}\n"
        "from trl_ext.rewards.isolation.sandbox import api as sandbox\nsandbox.sandbox_level({level})\n"
        "print('ready', flush=True)\n"
        "sandbox.run_program(b'import time\\ntime.sleep(60)', b'', sandbox.JobLimits(20.0, 256, 1024), {level})"
    )
    folders = set(glob.glob(f"{tempfile.gettempdir()}/sandbox-*"))
    for level in {0, sandbox.sandbox_level()[0]}:
        command = [sys.executable, "-c", script.format(path=sys.path, level=level)]
        trainer = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert trainer.stdout.readline() == b"ready\n"
        time.sleep(0.2)
        below = children(trainer.pid)
        assert below
        trainer.kill()
        trainer.communicate()
        deadline = time.monotonic() + HANG_S
        while any(os.path.exists(f"/proc/{pid}") for pid in below) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not [pid for pid in below if os.path.exists(f"/proc/{pid}")]
    assert set(glob.glob(f"{tempfile.gettempdir()}/sandbox-*")) <= folders
