"""A folder of wheels for a machine with a card that has torch, transformers, peft, pandas, rich and pytest, and can
download nothing.

    python -m benchmarks.gpu.wheels wheels              # fills the folder, and names what is in it
    make gpu-preflight WHEELS=wheels PYTHON=python3     # there: is all there?

What is wanted least is left out until the folder is small enough to travel.
"""

import argparse
import subprocess
import sys
from pathlib import Path

# By their worth: what comes last is left out first. Without deepspeed ZeRO's rows are skipped.
WHEELS = (
    *("trl", "datasets", "dill", "multiprocess", "xxhash", "deepspeed", "hjson", "msgpack", "einops", "py-cpuinfo"),
    *("ninja", "pydantic", "pydantic-core", "annotated-types", "typing-inspection"),
)
# What machines with cards have; --bare puts it in, first. Without peft LoRA's rows are skipped.
PRESENT = ("pyarrow", "pandas", "peft", "rich", "pytest")
# What those import in their turn.
BESIDE = ("markdown-it-py", "mdurl", "pygments", "iniconfig", "pluggy", "python-dateutil", "six")
# The smallest pyarrow that datasets takes; and no deepspeed of the days when it came as a wheel.
VERSIONS = {"pyarrow": "==21.*", "deepspeed": ">=0.18"}
LIMIT_MIB = 64.0
_MODULES = {"py-cpuinfo": "cpuinfo"}


def module_of(package: str) -> str:
    """The name that a package is imported by."""
    return _MODULES.get(package, package.replace("-", "_"))


def download(package: str, folder: Path, python_version: str) -> str:
    """Put a wheel into the folder; return why there is none, "" if there is."""
    pip = [sys.executable, "-m", "pip"]
    wanted = package + VERSIONS.get(package, "")
    only = ["--only-binary", ":all:", "--python-version", python_version]
    attempts = (
        [*pip, "download", "--quiet", "--no-deps", *only, "--dest", str(folder), wanted],
        [*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), wanted],  # a source alone, as deepspeed's
    )
    for command in attempts:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return ""
    return (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]


def mib_of(folder: Path) -> float:
    """Size of all wheels in the folder."""
    return sum(wheel.stat().st_size for wheel in folder.glob("*.whl")) / 2**20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--limit_mib", type=float, default=LIMIT_MIB, help="most that the folder may take")
    parser.add_argument("--python_version", default="3.12", help="of the machine with the card")
    parser.add_argument("--bare", action="store_true", help="it has torch, transformers and accelerate alone")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    left_out: dict[str, str] = {}
    wanted = (*PRESENT, *WHEELS, *BESIDE) if options.bare else WHEELS
    for package in wanted:
        before = set(options.folder.glob("*.whl"))
        reason = download(package, options.folder, options.python_version)
        if not reason and mib_of(options.folder) > options.limit_mib:
            for wheel in set(options.folder.glob("*.whl")) - before:
                wheel.unlink()
            reason = f"the folder would be over {options.limit_mib:g} MiB"
        if reason:
            left_out[package] = reason
    for wheel in sorted(options.folder.glob("*.whl")):
        print(f"{wheel.stat().st_size / 2**20:6.1f} MiB  {wheel.name}")
    print(f"{mib_of(options.folder):6.1f} MiB in all")
    for package, reason in left_out.items():
        print(f"left out: {package} ({reason})")
    return bool(set(left_out) & {*PRESENT, *WHEELS})


if __name__ == "__main__":
    sys.exit(main())
