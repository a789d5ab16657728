"""A manifest tells a whole checkpoint from every other folder."""

import json

import pytest

from trl_ext.trainers.checkpoints.manifest import MANIFEST, Damaged, Manifest, files_in, measured, rank_of, share_of

FILES = {"model.safetensors": b"weights" * 1000, "global_step3/zero_pp_rank_1_mp_rank_00_optim_states.pt": b"moments"}


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "checkpoint-3"
    for name, content in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    entries = {name: measured(folder / name) for name in files_in(folder)}
    Manifest(3, entries, run={"seed": {"seed": 42}}).write(folder)
    return folder


def problem(folder):
    try:
        manifest = Manifest.read(folder)
        manifest.check_sizes(folder)
        manifest.check_files(folder, manifest.files)
    except Damaged as error:
        return str(error)
    return ""


def test_what_was_written_is_read_and_a_file_that_came_later_is_no_damage(checkpoint):
    assert problem(checkpoint) == ""
    manifest = Manifest.read(checkpoint)
    assert (manifest.step, manifest.run, set(manifest.files)) == (3, {"seed": {"seed": 42}}, set(FILES))
    (checkpoint / "notes.txt").write_text("good run")
    assert problem(checkpoint) == ""


def test_a_folder_with_the_name_of_another_step_is_damage(checkpoint):
    exchanged = checkpoint.rename(checkpoint.with_name("checkpoint-5"))
    assert problem(exchanged) == f"its {MANIFEST} is of step 3: the folder was renamed or copied"
    assert problem(exchanged.rename(checkpoint.with_name("best"))) == ""


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["missing", "half", "empty", "flipped"])
def test_every_damage_names_its_file(checkpoint, name, damage):
    path, content = checkpoint / name, FILES[name]
    changed = {"half": content[: len(content) // 2], "empty": b"", "flipped": bytes([content[0] ^ 1]) + content[1:]}
    path.unlink() if damage == "missing" else path.write_bytes(changed[damage])
    assert name in problem(checkpoint)


def test_every_flipped_bit_of_the_manifest_is_found_and_what_is_none_is_damaged(checkpoint):
    whole = (checkpoint / MANIFEST).read_bytes()
    flipped = [whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :] for at in range(0, 400, 23)]
    for content in [*flipped, b"", b"{", b"[]", b"null", b'{"checksum": "0"}', b"\xff\xfe", b"[" * 100_000]:
        (checkpoint / MANIFEST).write_bytes(content)
        assert problem(checkpoint) == f"its {MANIFEST} is damaged", content[:400]


def test_a_manifest_of_another_layout_and_none_at_all(checkpoint):
    content = json.loads((checkpoint / MANIFEST).read_text())
    (checkpoint / MANIFEST).write_text(json.dumps(content | {"layout": 99}))
    assert "layout 99" in problem(checkpoint)
    (checkpoint / MANIFEST).unlink()
    assert problem(checkpoint) == f"it has no {MANIFEST}"


def test_a_file_is_read_by_the_process_that_wrote_it_and_processes_together_read_each_once():
    ranks = {
        "model-00002-of-00003.safetensors": 0,
        "rng_state.pth": 0,
        "rng_state_7.pth": 7,
        "rollouts_12.pt": 12,
        "global_step30/bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt": 3,
        "critic/engine/global_step1/zero_pp_rank_2_mp_rank_00_optim_states.pt": 2,
        "global_step30/mp_rank_00_model_states.pt": 0,
        "optimizer_0/__5_0.distcp": 5,
    }
    assert {name: rank_of(name) for name in ranks} == ranks
    names = ["optimizer.pt", *(f"rng_state_{i}.pth" for i in range(5))]
    for there in ([0], [0, 1, 2, 3], [2, 3]):
        assert sorted(name for rank in there for name in share_of(rank, there, names)) == sorted(names)
