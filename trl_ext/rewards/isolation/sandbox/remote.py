"""Run model-written Python in a sandbox elsewhere: Piston, SandboxFusion or E2B.

Program and input travel there, expected outputs never do. Each test is a run of its own. Processor time cannot be
asked for everywhere, so that the limit is one of the clock.

A program must not be able to make a run fail in a way that costs its row the value, so that a run that fails is
followed by one of an empty program and by a second attempt: where only the empty one works, the program is to blame.

Sources: engineer-man/piston docs/api-v2.md; bytedance/SandboxFusion sandbox/server/sandbox_api.py; e2b 2.63 on PyPI.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trl_ext.rewards.isolation.sandbox.client import JobLimits, Outcome, SandboxTrouble

_CONNECT_S, _GRACE_S = 10.0, 30.0
_FAILURES = (OSError, ValueError, TypeError, KeyError, AttributeError)  # No connection, and replies of another shape.

Reply = tuple[str, Any, str | None, str | None]  # how the program ended (see `Outcome`), exit code, output, errors


class _Overlong(Exception):
    """A reply is longer than the output may be."""


@dataclass(frozen=True, slots=True)
class RemoteSandbox:
    """A service that runs programs.

    Args:
        kind: A key of `KINDS`.
        base_url: Address of the service, up to the last word of its paths; none for E2B, whose SDK knows its own.
        api_key_env: Environment variable with the key, which is sent as a bearer token. None: no key.
    """

    kind: str
    base_url: str | None = None
    api_key_env: str | None = None

    def run(self, source: bytes, stdin: bytes, limits: JobLimits) -> Outcome:
        """Run a program on an input; SandboxTrouble where the service cannot even run an empty one."""
        try:
            code = source.decode()
        except UnicodeDecodeError:  # A lone surrogate, which no interpreter takes as source either.
            return Outcome("exit", 1, note="the code is not UTF-8")
        for attempt, program in enumerate((code, "pass", code)):
            try:
                outcome = self._outcome(program, stdin.decode(errors="replace"), limits)
                if attempt != 1:
                    return outcome
            except _FAILURES as error:
                if attempt == 1:
                    reason = f"{type(error).__name__}: {error}"[:300]
                    raise SandboxTrouble(f"The sandbox {self.kind} failed: {reason}") from error
        return Outcome("lost")

    def _outcome(self, program: str, stdin: str, limits: JobLimits) -> Outcome:
        try:
            ended, code, stdout, stderr = KINDS[self.kind](self, program, stdin, limits)
        except _Overlong:
            return Outcome("output")
        output = (stdout or "").encode(errors="replace")
        if len(output) > limits.output_bytes:
            return Outcome("output")
        last = (stderr or "").strip().rpartition("\n")[2]
        return Outcome(ended, code if isinstance(code, int) else -9, output=output, note=last[:300])

    def post(self, path: str, request: dict[str, Any], limits: JobLimits) -> Any:
        """The reply of a service that speaks JSON over HTTP."""
        import requests

        key = os.environ.get(self.api_key_env, "") if self.api_key_env else ""
        reply = requests.post(
            f"{(self.base_url or '').rstrip('/')}/{path}",
            json=request,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=(_CONNECT_S, limits.cpu_s + _GRACE_S),
            stream=True,
            allow_redirects=False,
        )
        with reply:
            body = bytearray()
            for part in reply.iter_content(2**16):
                body += part
                # JSON may take six bytes for one; the rest is for the error output.
                if len(body) > 6 * limits.output_bytes + 2**20:
                    raise _Overlong
        body = body.replace(key.encode(), b"***") if key else body
        if reply.status_code != 200:
            raise OSError(f"HTTP {reply.status_code}: {body[:200].decode(errors='replace')}")
        return json.loads(body)


def _piston(sandbox: RemoteSandbox, code: str, stdin: str, limits: JobLimits) -> Reply:
    request = {
        "language": "python",
        "version": "3",
        "files": [{"name": "answer.py", "content": code}],
        "stdin": stdin,
        "run_timeout": round(1000 * limits.cpu_s),
        "run_memory_limit": limits.memory_mib * 2**20,
    }
    run = sandbox.post("execute", request, limits)["run"]
    if run.get("status") == "XX":
        raise OSError(f"internal error: {run.get('message')}")
    ended = {"TO": "wall", "OL": "output", "EL": "output"}.get(run.get("status"), "exit")
    return ended, run["code"], run["stdout"], run["stderr"]


def _fusion(sandbox: RemoteSandbox, code: str, stdin: str, limits: JobLimits) -> Reply:
    options = {"language": "python", "run_timeout": limits.cpu_s, "memory_limit_MB": limits.memory_mib}
    reply = sandbox.post("run_code", {"code": code, "stdin": stdin, **options}, limits)
    run = reply["run_result"]
    if reply["status"] == "SandboxError" or run is None:
        raise OSError(str(reply["message"]))
    ended = "wall" if run["status"] == "TimeLimitExceeded" else "exit"
    return ended, run["return_code"], run["stdout"], run["stderr"]


def _e2b(sandbox: RemoteSandbox, code: str, stdin: str, limits: JobLimits) -> Reply:
    """A sandbox of its own for each run: what one program leaves behind, no other meets."""
    from e2b import CommandExitException, SandboxException, TimeoutException
    from e2b import Sandbox as E2BSandbox

    options = {"api_key": os.environ[sandbox.api_key_env]} if sandbox.api_key_env else {}
    lifetime_s = round(limits.cpu_s + _GRACE_S)
    try:
        with E2BSandbox.create(timeout=lifetime_s, allow_internet_access=False, **options) as machine:
            machine.files.write("answer.py", code)
            machine.files.write("input.txt", stdin)
            command = f"ulimit -v {limits.memory_mib * 1024}; python3 answer.py < input.txt"
            try:
                result = machine.commands.run(command, timeout=limits.cpu_s)
            except CommandExitException as error:
                result = error
            except TimeoutException:
                return "wall", None, "", ""
            finally:
                machine.kill()
    except SandboxException as error:
        raise OSError(str(error)) from error
    return "exit", result.exit_code, result.stdout, result.stderr


KINDS: dict[str, Callable[[RemoteSandbox, str, str, JobLimits], Reply]] = {
    "piston": _piston,
    "sandbox-fusion": _fusion,
    "e2b": _e2b,
}
