"""Folders of wheels for cards: a large wheel travels in pieces, and a part that lacks one says so and goes on."""

import pytest

from benchmarks.gpu import wheels


@pytest.fixture
def folder(tmp_path):
    """Wheels of 1, 2 and 25 MiB."""
    sizes = {"small-1-py3-none-any.whl": 1, "middle-1-py3-none-any.whl": 2, "large-1-py3-none-any.whl": 25}
    for name, mib in sizes.items():
        (tmp_path / name).write_bytes(bytes(index % 251 for index in range(2**20)) * mib + name.encode())
    return tmp_path


def contents(folder):
    return {wheel.name: wheel.read_bytes() for wheel in folder.glob("*.whl")}


def test_loads_are_small_enough_and_come_together_again(folder):
    before = contents(folder)
    loads = wheels.cut(folder, 10)
    assert [load.name for load in loads] == ["1", "2", "3"] and not contents(folder)
    assert all(sum(one.stat().st_size for one in load.iterdir()) <= 10 * 2**20 for load in loads)
    assert {"large-1-py3-none-any.whl.1of3", "small-1-py3-none-any.whl"} <= {one.name for one in loads[0].iterdir()}
    assert wheels.join(folder) == []
    assert contents(folder) == before and not list(folder.rglob("*.whl.*"))
    assert wheels.join(folder) == [], "once more changes nothing"


def test_a_load_that_did_not_arrive_leaves_its_wheel_out(folder):
    second = wheels.cut(folder, 10)[1]
    for piece in second.iterdir():
        piece.unlink()
    assert wheels.join(folder) == ["large-1-py3-none-any.whl is not joined: 2 of its 3 pieces are here."]
    assert contents(folder).keys() == {"small-1-py3-none-any.whl", "middle-1-py3-none-any.whl"}


def test_the_command_fills_the_folder_of_flash_attention_4_with_all_that_it_imports(tmp_path, monkeypatch, capsys):
    asked = []

    def download(package, folder, python_version):
        asked.append(package + wheels.VERSIONS.get(package, ""))
        (folder / f"{package}-1-py3-none-any.whl").write_bytes(b"x" * (3 * 2**20 if "cu13" in package else 2**18))
        return "no such package" if package == "protobuf" else ""

    monkeypatch.setattr(wheels, "download", download)
    monkeypatch.setattr(wheels, "LOAD_MIB", 4.0)
    monkeypatch.setattr("sys.argv", ["wheels", str(tmp_path), "--attention"])
    assert wheels.main() == 1
    said = capsys.readouterr().out
    assert "left out: protobuf (no such package)" in said and f"a load: {tmp_path / '2'}" in said
    # The parts of CUTLASS's compiler, and what they and the kernels import.
    assert {"flash-attn-4==4.0.0b36", "nvidia-cutlass-dsl-libs-core==4.8.1", "cuda-bindings"} <= set(asked)
    monkeypatch.setattr("sys.argv", ["wheels", str(tmp_path), "--join"])
    assert wheels.main() == 0 and len(list(tmp_path.glob("*.whl"))) == len(asked)
