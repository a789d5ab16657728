"""Run model-written Python against tests in a sandbox."""

import importlib.util
import json
import re
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from trl_ext.errors import RuleError
from trl_ext.rewards.base.rule import Row, Rule, Verdict, check_choice, check_column, check_number, check_whole
from trl_ext.rewards.isolation.sandbox import api, cases
from trl_ext.rewards.isolation.sandbox.outputs import wrong_result, wrong_text, wrong_tokens
from trl_ext.rewards.isolation.sandbox.suite import Suite, read_suite
from trl_ext.rewards.text.fences import python_answer
from trl_ext.rewards.text.prose import after_think

LONGEST_CODE = 100_000  # characters
_LEVELS = tuple(f"L{level}" for level in range(api.HIGHEST_LEVEL + 1))
# Status and message for each end of a job; after an exit, the exit code and the output decide.
_ENDINGS = {
    "exit": ("ok", ""),
    "cpu": ("timeout", "more than {cpu_s} s of processor time"),
    "wall": ("timeout", "no end in sight without using the processor"),
    "output": ("too_long", "more than {output_kib} KiB of output"),
    "lost": ("crashed", "the sandbox failed twice under it, and not otherwise"),
}


@dataclass(frozen=True, slots=True)
class Code(Rule):
    """1.0 when the completion's Python passes the tests column's tests, else 0.0.

    The code is the last closed block of Python after the last `</think>`, without blocks that only show how to use an
    earlier block. It runs on Linux, in a separate process that is confined as far as the machine allows (see
    `sandbox`). Expected outputs and values never enter that process. A row has no value if its tests cannot be read
    (`gold_invalid`) or the machine cannot run code (`infra_error`).

    Args:
        tests: Column with the tests.
        mode: "stdio" runs the code once per test. Tests are a list of {"input": ..., "output": ...}, or
            {"inputs": [...], "outputs": [...]}: the input and output texts of a script, or the arguments and result of
            a call if the tests name a function ("fn_name" of APPS and TACO, "testtype": "functional" of
            LiveCodeBench). "asserts" runs the code once, then the tests that call it: assert statements, functions
            `test_...`, or unittest's TestCases, as text or list of texts. Either may be JSON text.
        entry_point: Column with the name of the function under test, or with JSON that has it as "func_name"; the
            tests of "asserts" call it `candidate`. None if the tests name the function.
        setup: Column with Python that the tests of "asserts" use, as text or list of texts: helpers and imports
            (HumanEval's prompt, MBPP's `test_setup_code`, ClassEval's `import_statement`). It runs with the tests,
            and the candidate cannot replace it.
        compare: "tokens" compares printed text by line, as words and numbers; "text" compares it exactly, without
            trailing white space.
        tolerance: Absolute or relative error that is allowed if the expected number has a point or an exponent.
        unclosed_fence: True also takes a last block without an end, of a completion that was cut off.
        partial: True gives the share of tests passed. A test that overruns a limit ends the row.
        solution: Column with a program that passes, or a list of such programs, only for `trl-ext score audit`.
        require: Lowest sandbox level: "L0", "L1", "L2". On a machine below it the rule cannot be built.
        numpy: True lets code and tests import the installed NumPy, and no other package.
        cpu_s: Processor seconds of one test in "stdio", of the row in "asserts", with 5 ms for the sandbox. Code that
            sleeps may take five times as long.
        memory_mib: Largest address space of the process, in MiB.
        output_kib: Largest output of one test, in KiB; more is `too_long`.

    Example:
        >>> tests = [{"input": "4", "output": "16"}]
        >>> Code().score(Row(None, "```python\\nprint(int(input()) ** 2)\\n```", None, {"tests": tests})).value
        1.0
    """

    # The rule only waits, in bounded time; a worker of the pool could not keep the sandbox's server between rows.
    tier: ClassVar[str] = "inline"
    judges_correctness: ClassVar[bool] = True
    blank: ClassVar[str] = "```python\npass\n```"

    tests: str = "tests"
    mode: str = "stdio"
    entry_point: str | None = None
    setup: str | None = None
    compare: str = "tokens"
    tolerance: float = 1e-6
    unclosed_fence: bool = False
    partial: bool = False
    solution: str | None = None
    require: str = "L1"
    numpy: bool = False
    cpu_s: float = 2.0
    memory_mib: int = 512
    output_kib: int = 64

    def check(self) -> None:
        check_choice(self, "mode", self.mode, ("stdio", "asserts"))
        check_choice(self, "require", self.require, _LEVELS)
        check_choice(self, "compare", self.compare, ("tokens", "text"))
        check_column(self, "tests", self.tests)
        for key in ("entry_point", "setup", "solution"):
            if getattr(self, key) is not None:
                check_column(self, key, getattr(self, key))
        check_number(self, "tolerance", self.tolerance, "a number from 0 to below 1", lambda value: 0 <= value < 1)
        if self.mode == "stdio" and self.setup is not None:
            raise RuleError(f"Rule '{self.name}': setup is for mode 'asserts'. Leave it out.")
        if self.mode == "asserts" and (self.compare, self.tolerance) != ("tokens", 1e-6):
            raise RuleError(f"Rule '{self.name}': in mode 'asserts' the tests compare. Leave out compare, tolerance.")
        check_number(self, "cpu_s", self.cpu_s, "a finite number of at least 0.1", lambda seconds: seconds >= 0.1)
        check_whole(self, "memory_mib", self.memory_mib, 256 if self.numpy else 64)  # NumPy takes 110 itself.
        check_whole(self, "output_kib", self.output_kib, 1)
        if self.numpy and importlib.util.find_spec("numpy") is None:
            raise RuleError(f"Rule '{self.name}': numpy is true, and NumPy is not installed. Run pip install numpy.")
        self.check_level()

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(name for name in (self.tests, self.entry_point, self.setup) if name is not None)

    @property
    def ideal_columns(self) -> tuple[str, ...]:
        return () if self.solution is None else (self.solution,)

    def ideal(self, columns: Mapping[str, Any]) -> str | None:
        """Return the first solution in a code fence; None without a solution."""
        cell = None if self.solution is None else columns.get(self.solution)
        program = cases.first_text(cell)
        if program is None:
            return None
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", program)), default=0))
        return f"{fence}python\n{program}\n{fence}"

    def cache_key(self, row: Row) -> Hashable:
        code = python_answer(after_think(row.text), self.unclosed_fence)
        return cases.cell_text(row.columns[self.tests]), self._entry_point(row), self._setup(row), code

    def score(self, row: Row) -> Verdict:
        try:
            tests = self._read(row)
        except cases.UnreadableTests as error:
            return Verdict(None, "gold_invalid", f"column '{self.tests}': {error}")
        code = python_answer(after_think(row.text), self.unclosed_fence)
        if code is None:
            return Verdict(self.floor, "no_answer", "no closed block of Python")
        if len(code) > LONGEST_CODE:
            return Verdict(self.floor, "too_long", f"{len(code)} characters of code")
        self.check_level()
        try:
            source = code.encode("utf-8", "surrogatepass")
            return self._cases(source, tests) if self.mode == "stdio" else self._suite(source, tests)
        except api.SandboxTrouble as error:
            return Verdict(None, "infra_error", str(error))

    def score_batch(self, rows: Sequence[Row]) -> list[Verdict]:
        """Judge up to `MOST_JOBS` rows at the same time, because programs may sleep."""
        with ThreadPoolExecutor(api.MOST_JOBS) as threads:
            return list(threads.map(self.score, rows))

    def check_level(self) -> None:
        """Raise RuleError if this machine does not reach the level `require`."""
        try:
            level, trouble = api.sandbox_level(site=self._limits.site)
        except api.SandboxTrouble as error:
            raise RuleError(f"Rule '{self.name}': {error}. It needs Linux 5.3 or later.") from error
        if level < _LEVELS.index(self.require):
            raise RuleError(
                f"Rule '{self.name}': require is {self.require}, and this machine gives L{level} ({trouble}). Allow "
                "seccomp, Landlock and user namespaces in the container, or write require: "
                f"L{level} to run model-written code with less protection."
            )

    def _read(self, row: Row) -> Any:
        """Read the row's tests for the rule's mode; an UnreadableTests error names their problem."""
        text = cases.cell_text(row.columns[self.tests])
        if self.mode == "asserts":
            return read_suite(text, self._entry_point(row), self._setup(row))
        found = cases.read_cases(text, self._entry_point(row))
        longest = max(len(str(case.expected)) for case in found.cases)
        if longest > 1024 * self.output_kib:
            raise cases.UnreadableTests(f"an output of {longest} characters is above output_kib {self.output_kib}")
        return found

    def _entry_point(self, row: Row) -> str | None:
        return None if self.entry_point is None else cases.function_name(row.columns[self.entry_point])

    def _setup(self, row: Row) -> str:
        cell = "" if self.setup is None else row.columns[self.setup]
        cell = "\n".join(map(str, cell)) if isinstance(cell, list | tuple) else cell
        return cell if isinstance(cell, str) else ""

    @property
    def _limits(self) -> api.JobLimits:
        found = importlib.util.find_spec("numpy") if self.numpy else None
        site = str(Path(found.origin).parents[1]) if found and found.origin else ""
        return api.JobLimits(self.cpu_s, self.memory_mib, 1024 * self.output_kib, site)

    def _cases(self, source: bytes, found: cases.Cases) -> Verdict:
        """Run one process per test; the first failure decides, or with `partial` the share of passed tests."""
        passed, status, failure = 0, "ok", ""
        if found.function is not None:
            source = cases.calling(source, found.function)
        for index, case in enumerate(found.cases):
            outcome = api.run_program(source, case.stdin.encode("utf-8", "surrogatepass"), self._limits)
            reason = self._ending(outcome) or self._wrong(outcome, case, found.function is not None)
            passed += not reason
            if reason and not failure:
                status, failure = _ENDINGS[outcome.ended][0], f"; test {index + 1}: {reason}"
            if reason and not (self.partial and outcome.ended == "exit"):
                break
        return self._verdict(passed, len(found.cases), status, failure)

    def _wrong(self, outcome: api.Outcome, case: cases.Case, is_call: bool) -> str:
        """Return the problem of a program's exit code or output, or ""."""
        if outcome.code != 0:
            return f"exit code {outcome.code} {outcome.note}".strip()
        output = outcome.output.decode("utf-8", "replace")
        if is_call:
            return wrong_result(output, case.expected, self.tolerance)
        if self.compare == "text":
            return wrong_text(output, case.expected)
        return wrong_tokens(output, case.expected, self.tolerance)

    def _suite(self, source: bytes, suite: Suite) -> Verdict:
        """Run a process with the code, and a process with the tests, which writes the report."""
        job = json.dumps({**asdict(suite), "all": self.partial}).encode()
        outcome = api.run_tests(source, job, self._limits)
        passed, failure, unfit = read_report(outcome.output)
        if unfit:
            return Verdict(None, "gold_invalid", f"column '{self.tests}': {failure}")
        failure = self._ending(outcome) or failure
        if failure and passed == suite.num_tests:
            passed = 0  # The script failed after its last test, so the whole script fails.
        if outcome.note:
            failure = f"{failure} ({outcome.note})"
        status = _ENDINGS[outcome.ended][0]
        return self._verdict(passed, suite.num_tests, status, f"; {failure}" if failure else "")

    def _ending(self, outcome: api.Outcome) -> str:
        sentence = _ENDINGS[outcome.ended][1]
        return sentence.format(cpu_s=self.cpu_s, output_kib=self.output_kib)

    def _verdict(self, passed: int, num_tests: int, status: str, failure: str) -> Verdict:
        """Return the verdict on a program: 1.0 if all tests pass, or with `partial` the share that passes.

        Args:
            passed: Number of passed tests.
            num_tests: Number of all tests.
            status: Status of the verdict.
            failure: The first failure, as the end of a sentence that begins with the number of passed tests, or "".
        """
        share = passed / num_tests if self.partial else float(passed == num_tests)
        return Verdict(share, status, f"{passed} of {num_tests} tests pass{failure}"[:300])


class SuiteReport(NamedTuple):
    """The report of a suite: the number of passed tests, the first failure or "", and True if the tests are wrong."""

    passed: int
    failure: str
    unfit: bool


def read_report(output: bytes) -> SuiteReport:
    """Read the report that the tests' process has written; without a report no test has passed."""
    try:
        passed, failure, unfit = json.loads(output)
        return SuiteReport(int(passed), str(failure), unfit is True)
    except (ValueError, TypeError):
        return SuiteReport(0, "the tests did not end", False)
