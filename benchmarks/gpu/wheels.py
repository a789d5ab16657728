"""A folder of wheels for a machine with a card that has torch, transformers, peft, pandas, rich and pytest, and can
download nothing.

    python -m benchmarks.gpu.wheels wheels              # fills the folder, and names what is in it
    make gpu-preflight WHEELS=wheels PYTHON=python3     # there: is all there?
    python -m benchmarks.gpu.wheels flash --attention   # FlashAttention 4, in loads flash/1 and flash/2, a call each

What is wanted least is left out until the folder is small enough to travel. The loads of FlashAttention 4 hold pieces
of a large wheel; copied into the folder that WHEELS names, they are joined before anything is installed.
"""

import argparse
import math
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
# FlashAttention 4, which compiles its kernels where it runs, and all that it imports but torch.
ATTENTION = (
    *("flash-attn-4", "quack-kernels", "apache-tvm-ffi", "torch-c-dlpack-ext", "einops", "cuda-bindings"),
    *("cuda-pathfinder", "protobuf", "typing-extensions", "nvidia-cutlass-dsl"),
    *(f"nvidia-cutlass-dsl-libs-{part}" for part in ("core", "base", "cu13")),
)
# The smallest pyarrow that datasets takes; and no deepspeed of the days when it came as a wheel.
VERSIONS = {"pyarrow": "==21.*", "deepspeed": ">=0.18", "flash-attn-4": "==4.0.0b36"}
# The parts of CUTLASS's compiler want each other's version.
VERSIONS |= {name: "==4.8.1" for name in ATTENTION if name.startswith("nvidia-cutlass-dsl")}
LIMIT_MIB, LOAD_MIB = 64.0, 54.0
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


def cut(folder: Path, load_mib: float) -> list[Path]:
    """Move the folder's wheels into folders "1", "2", ... of at most so many MiB, large wheels in pieces."""
    limit = int(load_mib * 2**20)
    room, loads = limit, [folder / "1"]
    for wheel in sorted(folder.glob("*.whl"), key=lambda wheel: wheel.stat().st_size):
        data = wheel.read_bytes()
        first = data[:room]
        rest = [data[start : start + limit] for start in range(len(first), len(data), limit)]
        for number, piece in enumerate(pieces := [first, *rest], 1):
            if number > 1:
                loads.append(folder / str(len(loads) + 1))
            loads[-1].mkdir(exist_ok=True)
            name = wheel.name if len(pieces) == 1 else f"{wheel.name}.{number}of{len(pieces)}"
            (loads[-1] / name).write_bytes(piece)
        room = (limit if rest else room) - len(pieces[-1])
        wheel.unlink()
    return loads


def join(folder: Path) -> list[str]:
    """Join the pieces in a folder and the folders in it into its wheels; sentences about wheels that lack pieces."""
    for wheel in folder.glob("*/*.whl"):
        wheel.rename(folder / wheel.name)
    pieces: dict[str, list[Path]] = {}
    for piece in folder.rglob("*.whl.*of*"):
        pieces.setdefault(piece.name.rpartition(".")[0], []).append(piece)
    lacking = []
    for name, found in pieces.items():
        number = int(found[0].name.rpartition("of")[2])
        if len(found) < number:
            lacking.append(f"{name} is not joined: {len(found)} of its {number} pieces are here.")
            continue
        found.sort(key=lambda piece: int(piece.name.rpartition(".")[2].partition("of")[0]))
        (folder / name).write_bytes(b"".join(piece.read_bytes() for piece in found))
        for piece in found:
            piece.unlink()
    return lacking


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--limit_mib", type=float, default=LIMIT_MIB, help="most that the folder may take")
    parser.add_argument("--python_version", default="3.12", help="of the machine with the card")
    parser.add_argument("--bare", action="store_true", help="it has torch, transformers and accelerate alone")
    parser.add_argument("--attention", action="store_true", help="FlashAttention 4 instead, in loads for a call each")
    parser.add_argument("--join", action="store_true", help="on the machine with the card: join the pieces of loads")
    options = parser.parse_args()
    if options.join:
        print(*join(options.folder), sep="\n")
        return 0
    options.folder.mkdir(parents=True, exist_ok=True)
    left_out: dict[str, str] = {}
    wanted = ATTENTION if options.attention else (*PRESENT, *WHEELS, *BESIDE) if options.bare else WHEELS
    limit_mib = math.inf if options.attention else options.limit_mib
    for package in wanted:
        before = set(options.folder.glob("*.whl"))
        reason = download(package, options.folder, options.python_version)
        if not reason and mib_of(options.folder) > limit_mib:
            for wheel in set(options.folder.glob("*.whl")) - before:
                wheel.unlink()
            reason = f"the folder would be over {limit_mib:g} MiB"
        if reason:
            left_out[package] = reason
    for wheel in sorted(options.folder.glob("*.whl")):
        print(f"{wheel.stat().st_size / 2**20:6.1f} MiB  {wheel.name}")
    print(f"{mib_of(options.folder):6.1f} MiB in all")
    for package, reason in left_out.items():
        print(f"left out: {package} ({reason})")
    if options.attention:
        print(*(f"a load: {load}" for load in cut(options.folder, LOAD_MIB)), sep="\n")
        return bool(left_out)
    return bool(set(left_out) & {*PRESENT, *WHEELS})


if __name__ == "__main__":
    sys.exit(main())
