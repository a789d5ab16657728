"""A machine that refuses user namespaces: programs run at L1, and every message about it names what refuses them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trl_ext.rewards.isolation import kernel

# A process in a user namespace in which no other may be made. Where the kernel refuses the first, none can be either.
REFUSED = """
import json, logging, sys
from contextlib import suppress
from trl_ext.rewards.isolation import kernel
with suppress(OSError):
    kernel.call("unshare", 0x10000000)
    open("/proc/sys/user/max_user_namespaces", "w").write("0")

from trl_ext.doctor import examine, look
from trl_ext.rewards import Code
logging.basicConfig(level=logging.INFO, format="%(message)s")
try:
    Code(require="L2")
except ValueError as error:
    refusal = str(error)
found = [(one.level, one.what) for one in examine(look(probe_s=0)) if one.subject == "sandbox"]
print(json.dumps([refusal, *found, Code().require]))
"""


def test_the_log_the_rule_and_the_doctor_name_what_refuses_namespaces():
    done = subprocess.run([sys.executable, "-c", REFUSED], capture_output=True, text=True, check=True)
    refusal, (level, what), required = json.loads(done.stdout)
    (logged,) = [line for line in done.stderr.splitlines() if line.startswith("Model-written")]
    reasons = {words.partition("(namespaces: ")[2].partition(")")[0] for words in (refusal, what, logged)}
    assert len(reasons) == 1 and "; " in (reason := reasons.pop())
    assert "user.max_user_namespaces is 0; to allow" in reason or "kernel." in reason or "the container" in reason
    assert (level, required) == ("note", "L1") and "at L1, not at L2" in what and "runs at sandbox level L1" in logged
    assert "require is L2, and this machine gives L1" in refusal


@pytest.mark.parametrize(
    ("setting", "value", "command"),
    [
        ("user.max_user_namespaces", "0", "sudo sysctl -w user.max_user_namespaces=10000"),
        ("kernel.unprivileged_userns_clone", "0", "sudo sysctl -w kernel.unprivileged_userns_clone=1"),
        (
            "kernel.apparmor_restrict_unprivileged_userns",
            "1",
            "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
        ),
        ("user.max_user_namespaces", "96364", "Docker's seccomp profile does"),
    ],
)
def test_the_setting_is_named_with_the_command_that_changes_it(setting, value, command, tmp_path, monkeypatch):
    file = tmp_path.joinpath("proc/sys", *setting.split("."))
    file.parent.mkdir(parents=True)
    file.write_text(f"{value}\n")
    monkeypatch.setattr(kernel, "Path", lambda *parts: Path(tmp_path, *(part.lstrip("/") for part in parts)))
    assert kernel.why_no_namespaces().endswith(command)
