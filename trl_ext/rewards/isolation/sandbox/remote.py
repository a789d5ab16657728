"""Run model-written Python in a remote sandbox: SandboxFusion's server, a container.

The server gets program and input, never expected outputs. Each test is a separate run. The server does not limit
processor time, so the limit is wall-clock time.

After a failed run, an empty program and then the program again are run: if only the empty program works, the program
is at fault and its row keeps a value.

Source: bytedance/SandboxFusion sandbox/server/sandbox_api.py.
"""

import asyncio
import json
from dataclasses import dataclass

from trl_ext.rewards.base.http_client import LongReply, fetch, new_client
from trl_ext.rewards.isolation.sandbox.api import JobLimits, Outcome, SandboxTrouble

_GRACE_S = 30.0


@dataclass(frozen=True, slots=True)
class RemoteSandbox:
    """A service that runs programs.

    Args:
        base_url: Address of the service.
        api_key_env: Environment variable with the key, sent as a bearer token. None: no key.
    """

    base_url: str
    api_key_env: str | None = None

    def run(self, source: bytes, stdin: bytes, limits: JobLimits) -> Outcome:
        """Run a program on an input; SandboxTrouble if the service cannot run an empty program."""
        try:
            code = source.decode()
        except UnicodeDecodeError:  # A lone surrogate, which no interpreter takes as source either.
            return Outcome("exit", 1, note="the code is not UTF-8")
        for attempt, program in enumerate((code, "pass", code)):
            try:
                outcome = self._outcome(program, stdin.decode(errors="replace"), limits)
                if attempt != 1:
                    return outcome
            except Exception as error:  # no connection, and replies of another shape
                if attempt == 1:
                    reason = f"{type(error).__name__}: {error}"[:300]
                    raise SandboxTrouble(f"The sandbox at {self.base_url} failed: {reason}") from error
        return Outcome("lost")

    def _outcome(self, program: str, stdin: str, limits: JobLimits) -> Outcome:
        options = {"language": "python", "run_timeout": limits.cpu_s, "memory_limit_MB": limits.memory_mib}
        content = json.dumps({"code": program, "stdin": stdin, **options}).encode()
        most = 6 * limits.output_bytes + 2**20  # JSON may need six bytes per byte; the rest is for the error output.
        try:
            reply = json.loads(asyncio.run(self._reply(content, limits.cpu_s + _GRACE_S, most)))
        except LongReply:
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

    async def _reply(self, content: bytes, timeout_s: float, most_bytes: int) -> bytes:
        async with new_client() as client, asyncio.timeout(timeout_s):
            url = f"{self.base_url.rstrip('/')}/run_code"
            return await fetch(url, content, self.api_key_env or "", timeout_s, client=client, most_bytes=most_bytes)
