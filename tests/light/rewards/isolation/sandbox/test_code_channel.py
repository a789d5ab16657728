"""Between candidate and tests: what crosses the channel, what does not; and which system calls the filter allows."""

import os
import random
import socket
import struct
import threading
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from decimal import Decimal
from fractions import Fraction

import pytest

from trl_ext.rewards.isolation.sandbox.channel import (
    ALL_OPERATIONS,
    CALLS_ONLY,
    Channel,
    ChannelLost,
    RemoteObject,
    decode,
    encode,
    rebuilt_error,
)
from trl_ext.rewards.isolation.sandbox.restrictions import MACHINES, assemble, plain_numbers

ALLOW, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
PID = 4242


class Equal:
    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0

    def __sub__(self, other: object) -> float:
        return 0.0

    def __lt__(self, other: object) -> bool:
        return True


class EqualList(list):
    __eq__ = Equal.__eq__
    __hash__ = Equal.__hash__


@pytest.fixture
def linked():
    """A function that links the names of a candidate and gives the tests' side."""
    threads = []

    def channel(**names: object) -> Channel:
        ours, theirs = (side.detach() for side in socket.socketpair())
        served = Channel(theirs, theirs, ALL_OPERATIONS, names)
        thread = threading.Thread(target=served.serve, daemon=True)
        thread.start()
        threads.append((ours, theirs, thread))
        return Channel(ours, ours, CALLS_ONLY, {})

    yield channel
    for ours, theirs, thread in threads:
        os.close(ours)
        thread.join(5)
        os.close(theirs)


def test_plain_data_arrives_as_it_was(linked, subtests):
    for value in (
        *(None, True, 0, -(10**400), 2**63, 1.5, float("inf"), "a\ud800\x00é", b"\x00\xff", bytearray(b"a")),
        *([1, [2, (3,)]], (), {1: {(2, 3): [4]}}, {1, 2}, frozenset({1}), deque([1]), range(1, 10**30, 3), 1 + 2j),
        *(Fraction(1, 3), Decimal("0.10"), Counter("aab")),
    ):
        with subtests.test(value=value):
            got = linked(f=lambda x: x).look_up("f")(value)
            assert type(got) is type(value) and got == value


def test_relatives_of_plain_data_arrive_as_plain_data(linked):
    pair = namedtuple("P", "x y")(1, 2)
    for value, arrives in ((OrderedDict(a=1), {"a": 1}), (defaultdict(list, a=[1]), {"a": [1]}), (pair, (1, 2))):
        got = linked(f=lambda value=value: value).look_up("f")()
        assert type(got) is type(arrives) and got == arrives


@pytest.mark.parametrize("fake", [Equal(), EqualList([1]), Equal])
def test_an_objects_own_comparison_takes_no_part(fake, linked):
    got = linked(f=lambda: fake).look_up("f")()
    assert isinstance(got, RemoteObject)
    for expected in (1, "x", [1], None, (1,), {1: 2}):
        assert got != expected and expected != got
        assert expected not in [got] and got not in [expected]
    with pytest.raises(TypeError):
        got < 3  # noqa: B015
    with pytest.raises(TypeError):
        abs(got - 3.0)


def test_objects_of_the_candidate_compare_among_each_other(linked):
    make = linked(P=namedtuple("P", "x"), F=lambda: Equal()).look_up("F")
    assert make() == make()


def test_an_exception_keeps_its_kind_if_it_is_pythons_own(linked):
    def raising(name: str) -> None:
        raise {"value": ValueError, "own": type("Own", (Exception,), {})}[name]("why")

    f = linked(f=raising).look_up("f")
    with pytest.raises(ValueError, match="why"):
        f("value")
    with pytest.raises(Exception, match="Own: why"):
        f("own")


def test_an_exception_never_ends_the_tests():
    for name in ("SystemExit", "KeyboardInterrupt", "BaseException", "exit", "print", "Nothing", 3, None):
        assert isinstance(rebuilt_error(name, "x"), Exception)


def test_changes_of_an_argument_come_back(linked):
    values = [3, 1, 2]
    assert linked(f=lambda x: x.sort()).look_up("f")(values) is None
    assert values == [1, 2, 3]


def test_a_function_of_the_tests_can_be_called_and_nothing_else(linked):
    secret = "expected"

    def helper(x: int) -> int:
        return x + len(secret)

    def looks_inside(function: RemoteObject) -> list[str]:
        found = []
        for operation, *rest in (("attribute", "__globals__"), ("text",), ("iterate",), ("item", 0), ("name",)):
            try:
                found.append(function._channel.ask(operation, function._handle, *rest))
            except Exception as error:
                found.append(type(error).__name__)
        return found

    channel = linked(call=lambda f: f(1), look=looks_inside)
    assert channel.look_up("call")(helper) == 9
    assert set(channel.look_up("look")(helper)) <= {"ValueError", "AttributeError"}


def test_a_side_that_ends_is_no_exception_that_tests_expect(linked):
    ours, theirs = socket.socketpair()
    channel = Channel(ours.fileno(), ours.fileno(), CALLS_ONLY, {})
    theirs.close()
    with pytest.raises(ChannelLost):
        channel.look_up("f")
    assert channel.lost and not issubclass(ChannelLost, Exception)
    ours.close()


def test_nonsense_on_the_channel_is_an_exception_or_a_lost_channel(subtests):
    for data in (
        *(b"", b"null", b"[]", b"5", b"{", b"\xff", b"[" * 10_000, b'{"value": {}}', b'{"value": ["int", "x"]}'),
        *(b'{"value": ["int"]}', b'{"value": ["yours", 7]}', b'{"value": ["yours", -1]}', b'{"value": ["eval", "1"]}'),
        *(b'{"value": ["dict", [[["list", []], 1]]]}', b'{"raised": ["SystemExit", ""]}', b'{"raised": []}', b"{}"),
        b'{"do": "attribute", "on": 0}',
    ):
        with subtests.test(data=data):
            ours, theirs = socket.socketpair()
            with ours, theirs:
                theirs.sendall(struct.pack("<I", len(data)) + data)
                theirs.shutdown(socket.SHUT_WR)
                with pytest.raises((Exception, ChannelLost)):
                    Channel(ours.fileno(), ours.fileno(), CALLS_ONLY, {}).look_up("f")


def test_random_json_never_becomes_anything_but_plain_data():
    source = random.Random(0)
    tags = ["int", "list", "dict", "counter", "tuple", "set", "range", "fraction", "decimal", "complex", "mine", "x"]

    def grow(depth: int) -> object:
        pick = source.random()
        if depth > 4 or pick < 0.4:
            return source.choice([None, True, 1, -1.5, "a", "0x1f", "1/3", "", []])
        if pick < 0.7:
            return [source.choice(tags), [grow(depth + 1) for _ in range(source.randrange(4))]]
        return [source.choice(tags), grow(depth + 1)]

    def refuse(data: list[object]) -> None:
        raise ValueError(data)

    for _ in range(3000):
        try:
            value = decode(grow(0), refuse)
        except (ValueError, TypeError, ArithmeticError):
            continue
        again = encode(value, lambda thing: pytest.fail(f"{thing!r} is no plain data"))
        assert again is not Ellipsis


def run_filter(program: bytes, machine: int, number: int, arguments: tuple[int, ...] = ()) -> int:
    """What the filter returns for a call: the five BPF operations that it uses."""
    words = {0: number, 4: machine}
    for place, value in enumerate(arguments):
        words[16 + 8 * place], words[20 + 8 * place] = value & 0xFFFFFFFF, value >> 32 & 0xFFFFFFFF
    steps = list(struct.iter_unpack("=HBBI", program))
    place, loaded = 0, 0
    while True:
        code, if_true, if_false, operand = steps[place]
        place += 1
        if code == 0x06:
            return operand
        if code == 0x20:
            loaded = words.get(operand, 0)
        else:
            true = {0x15: loaded == operand, 0x35: loaded >= operand, 0x45: bool(loaded & operand)}[code]
            place += if_true if true else if_false


@pytest.mark.parametrize(
    ("machine", "denied"),
    [
        # socket, connect, bind, fork, vfork, execve, ptrace, mount, unshare, setns, bpf, io_uring, keyctl, prctl,
        # process_vm_readv, unlink, rename, mkdir, chmod, userfaultfd, pidfd_send_signal, execveat, seccomp
        ("x86_64", "41 42 49 57 58 59 101 165 272 308 321 425 250 157 310 87 82 83 90 323 424 322 317"),
        # socket, connect, bind, execve, ptrace, mount, unshare, setns, bpf, io_uring, keyctl, prctl, process_vm_readv,
        # unlinkat, renameat2, mkdirat, fchmodat, userfaultfd, pidfd_send_signal, execveat, seccomp
        ("aarch64", "198 203 200 221 117 40 97 268 280 425 219 167 270 35 276 34 53 282 424 281 277"),
    ],
)
def test_the_filter_allows_its_list_and_nothing_else(machine, denied):
    arch, plain, special = MACHINES[machine]
    program = assemble(machine, PID)
    allowed = set(plain_numbers(plain))
    assert not allowed & set(map(int, denied.split()))
    for number in range(1024):
        if number in special.values():
            continue
        assert run_filter(program, arch, number) == (ALLOW if number in allowed else EPERM)
    assert len(program) // 8 < 4096


def test_the_filter_looks_at_arguments(subtests):
    for name, arguments, result in (
        *(("clone", (0x00010000 | 0x100,), ALLOW), ("clone", (17,), EPERM), ("clone", (0x10000000 | 17,), EPERM)),
        *(("clone3", (), ENOSYS), ("kill", (PID, 9), ALLOW), ("kill", (PID + 1, 9), EPERM), ("kill", (-1, 9), EPERM)),
        *(("kill", (0, 9), EPERM), ("kill", (-PID, 9), EPERM), ("tgkill", (PID, 1, 9), ALLOW)),
        *(("tgkill", (1, 1, 9), EPERM), ("ioctl", (1, 0x5401), ALLOW), ("ioctl", (1, 0x5412), EPERM)),
        *(("fcntl", (1, 3), ALLOW), ("fcntl", (1, 8, 1), EPERM), ("sendto", (3, 4, 5, 0, 0, 0), ALLOW)),
        *(("sendto", (3, 4, 5, 0, 0x7000, 16), EPERM), ("sendto", (3, 4, 5, 0, 1 << 32, 16), EPERM)),
        *(("prlimit64", (0, 7), ALLOW), ("prlimit64", (1, 7), EPERM)),
    ):
        with subtests.test(name=name, arguments=arguments):
            for machine, (arch, _, special) in MACHINES.items():
                assert run_filter(assemble(machine, PID), arch, special[name], arguments) == result


def test_the_filter_kills_what_comes_by_another_door():
    program = assemble("x86_64", PID)
    assert run_filter(program, 0x40000003, 0) == KILL  # 32-bit calls have other numbers.
    assert run_filter(program, 0xC000003E, 0x40000000) == KILL
