"""Run model-written Python in a sandbox elsewhere: SandboxFusion's server, which is one container.

Program and input travel there, expected outputs never do. Each test is a run of its own. Processor time cannot be
asked for, so that the limit is one of the clock.

A program must not be able to make a run fail in a way that costs its row the value, so that a run that fails is
followed by one of an empty program and by a second attempt: where only the empty one works, the program is to blame.

Source: bytedance/SandboxFusion sandbox/server/sandbox_api.py.
"""

import json
import os
from dataclasses import dataclass
from typing import Any

from trl_ext.rewards.isolation.sandbox.client import JobLimits, Outcome, SandboxTrouble

_CONNECT_S, _GRACE_S = 10.0, 30.0
_FAILURES = (OSError, ValueError, TypeError, KeyError, AttributeError)  # No connection, and replies of another shape.


class _Overlong(Exception):
    """A reply is longer than the output may be."""


@dataclass(frozen=True, slots=True)
class RemoteSandbox:
    """A service that runs programs.

    Args:
        base_url: Address of the service.
        api_key_env: Environment variable with the key, which is sent as a bearer token. None: no key.
    """

    base_url: str
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
                    raise SandboxTrouble(f"The sandbox at {self.base_url} failed: {reason}") from error
        return Outcome("lost")

    def _outcome(self, program: str, stdin: str, limits: JobLimits) -> Outcome:
        options = {"language": "python", "run_timeout": limits.cpu_s, "memory_limit_MB": limits.memory_mib}
        try:
            reply = self._post({"code": program, "stdin": stdin, **options}, limits)
        except _Overlong:
            return Outcome("output")
        run = reply["run_result"]
        if reply["status"] == "SandboxError" or run is None:
            raise OSError(str(reply["message"]))
        ended = "wall" if run["status"] == "TimeLimitExceeded" else "exit"
        code, output = run["return_code"], (run["stdout"] or "").encode(errors="replace")
        if len(output) > limits.output_bytes:
            return Outcome("output")
        last = (run["stderr"] or "").strip().rpartition("\n")[2]
        return Outcome(ended, code if isinstance(code, int) else -9, output=output, note=last[:300])

    def _post(self, request: dict[str, Any], limits: JobLimits) -> Any:
        import requests

        key = os.environ.get(self.api_key_env, "") if self.api_key_env else ""
        reply = requests.post(
            f"{self.base_url.rstrip('/')}/run_code",
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
