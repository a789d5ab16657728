"""The speed benchmark for cards: operations, scaling to a card, ratios; and tiny rows that run here."""

import json
import sys

import pytest
import torch
from rich.console import Console
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from benchmarks.gpu import beside, exact, flops, runner, speed, speed_rows, speed_worker
from benchmarks.gpu.speed_rows import CONFIG, ENGINES, FULL_SHAPES, OWN_ROWS, PEER_ROWS, TINY, WAYS, needed_flops, rows
from tests.fake_card import FakeCard
from trl_ext.memory import find_shape, parse_gpus
from trl_ext.memory.units import GIB
from trl_ext.trainers.fit.rehearsal import rehearsal

TOY = {**CONFIG, **TINY}


def toy():
    values = dict(TOY)
    config = CONFIG_MAPPING[values.pop("model_type")](**values)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def test_operations_are_those_that_torch_counts():
    tokens = 24
    with FlopCounterMode(display=False) as counted:
        toy()(torch.zeros(1, tokens, dtype=torch.long), logits_to_keep=tokens)
    # Torch counts every query with every key; ours, each with those before it and itself.
    looks = TOY["num_hidden_layers"] * flops.attention_flops(TOY)
    unseen = looks * (tokens**2 - tokens * (tokens + 1) / 2)
    assert flops.forward_flops(TOY, 0, [tokens]) == counted.get_total_flops() - unseen


def test_a_shared_prompt_counts_once():
    prompt = 10 * flops.linear_flops(TOY) + 55 * flops.attention_flops(TOY)
    twice = 2 * flops.forward_flops(TOY, 10, [5])
    assert flops.forward_flops(TOY, 10, [5, 5]) == twice - TOY["num_hidden_layers"] * prompt


def test_the_model_is_qwen3_8b_and_its_layers_follow_the_card():
    for gib, peak in ((141, 989.0), (80, 989.0), (80, None)):
        made = {row.name: row for row in rows("full", gib * GIB, peak)}
        steps = {f"step/{shape}-{engine}" for shape in ("dualkv", "tail") for engine in ENGINES if engine}
        ways = {f"{base}-{way}" for base in ("update/dualkv", "update/tail", "peers/trl-1.7B") for way in WAYS}
        assert {name.rpartition("/")[0] for name in made} == {*FULL_SHAPES, *steps, *OWN_ROWS, *PEER_ROWS, *ways}
        one = made["update/dualkv/trl"]
        assert one.config["hidden_size"] == 4096 and 1 < one.config["num_hidden_layers"] < 36
        assert one.scale.startswith(f"{one.config['num_hidden_layers']} of 36 layers, ")
        assert one.config == made["update/dualkv/trl_ext"].config
    assert one.scale.endswith("what its memory holds")


def predicted_gib(row, card_gib):
    hardware = parse_gpus("1xH100-80GB", card_gib)
    return beside.predict(find_shape(row.config), row.job, hardware, generates=False)["reserved"] / GIB


@pytest.mark.parametrize(
    ("gib", "kind", "fewer", "of_all"),
    [  # every so many layers, in forwards that are so many times smaller
        (80, "peers/trl-1.7B", (4, 1), (4, 1)),
        (141, "update/dualkv", (2, 1), (2, 1)),
        (80, "update/dualkv", (2, 4), (1, 1)),
    ],
)
def test_fewer_layers_are_checkpointed_where_the_card_holds_them(gib, kind, fewer, of_all):
    made = {row.name: row for row in rows("full", gib * GIB, 989.0)}
    base = made[f"{kind}/trl_ext"]
    for way, (every, share) in (("fewer", fewer), ("all", of_all), ("keep", (1, 1))):
        row = made[f"{kind}-{way}/trl_ext"]
        assert row.checkpointing.get("every_n_layers", 1) == row.job.checkpoint_every == every, way
        assert row.budget * share == base.budget and row.config == base.config
        assert row.job.keep_attention == (way != "fewer")
        assert predicted_gib(row, gib) <= 0.9 * gib or share == 4, "the smallest forwards are tried anyway"


def test_all_ways_at_once_take_the_first_attention_that_is_installed(monkeypatch):
    monkeypatch.setattr(speed_rows, "has_attention", lambda name: name == "flash_attention_4")
    made = {row.name: row for row in rows("full", 141 * GIB, 989.0)}
    assert made["update/dualkv-all/trl_ext"].attention == made["update/dualkv-fa4/trl_ext"].attention
    assert {made[f"update/dualkv-{way}/trl_ext"].needs[-1] for way in ("fa3", "fa4", "all", "keep")} == {
        *("flash-attn-3", "flash-attn-4", "trl_ext"),
    }


def test_a_row_whose_attention_another_kernel_computed_is_no_figure(monkeypatch):
    (row,) = runner.chosen(rows("tiny", None, None), ["update/tail-fa4/trl_ext"])
    assert speed.run_row(row, "cpu", 1.0)["reason"] == "flash-attn-4 is not installed."
    words = "attention: PyTorch's varlen kernel; layers: Liger's"
    answer = {"status": "measured", "packed": True, "kernels": words}
    monkeypatch.setattr(speed, "is_here", lambda name: True)
    monkeypatch.setattr(speed.runner, "ask", lambda *_: answer)
    found = speed.run_row(row, "cpu", 1.0)
    assert (found["status"], found["reason"]) == ("failed", f"Its kernels were not of flash_attention_4: {words}.")


def test_a_card_that_holds_all_gets_all_layers():
    row = next(row for row in rows("full", 1000 * GIB, None) if row.name == "update/dualkv/trl")
    assert row.scale == "36 of 36 layers, as many as there are"
    # Six operations a weight and token; what is above them is attention and the LM head.
    linear = 6 * 36 * (flops.linear_flops(row.config) / 2) * (8192 + 32 * 2048)
    assert linear < needed_flops(row, [2048] * 32) < 1.5 * linear


def test_a_card_that_is_not_in_the_table_gives_a_sentence_and_no_seconds(monkeypatch, capsys):
    for module in (beside, runner, speed):
        monkeypatch.setattr(module, "card_name", lambda: "A card of tomorrow")
    monkeypatch.setattr(runner, "has_card", lambda: True)
    monkeypatch.setattr(speed, "card_bytes", lambda device: 80 * GIB)
    options = runner.parser("gpu_speed", "").parse_args([])
    wanted = rows("tiny", None, None)
    assert runner.begin(options, wanted, Console(width=300)) is None
    assert capsys.readouterr().out.startswith("'A card of tomorrow' is not in the table of cards")
    found = {"allocated": 5 * GIB, "reserved": 6 * GIB, "phases": {"update": 2.0, "generate": 1.0}}
    held = speed.held(wanted[0], found)
    assert held["predicted"]["allocated"] > 0 and held["predicted"]["seconds"] == {}
    assert held["measured"]["seconds"] == {"update": 2.0} and held["error_pct"]["update_s"] is None


def made_up(name, step, update):
    return {"row": name, "status": "measured", "step_s": step, "phases": {"update": update}}


def test_ratios_are_of_the_same_shape_and_of_rows_that_ended():
    records = [
        made_up("update/tail/trl", 6.0, 5.0),
        made_up("update/tail/trl_ext", 2.0, 1.0),
        {"row": "update/dualkv/trl", "status": "oom", "reason": "made up"},
        made_up("update/dualkv/trl_ext", 2.0, 1.0),
    ]
    assert speed.summary(records) == {"faster_than": {"update/tail/trl": {"step": 3.0, "update": 5.0}}}
    records += [made_up("update/tail-all/trl_ext", 1.0, 0.8), made_up("update/dualkv-keep/trl_ext", 2.0, 0.5)]
    by_way = {"update/tail-all/trl_ext": (2.0, 1.25), "update/dualkv-keep/trl_ext": (1.0, 2.0)}
    found = {name: (times["step"], times["update"]) for name, times in speed.summary(records)["faster_by"].items()}
    assert found == by_way


def test_without_a_card_it_says_so_and_the_list_works(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for script in (speed, exact):
        monkeypatch.setattr(sys, "argv", ["benchmark"])
        assert script.main() == 2
        assert capsys.readouterr().out.startswith("There is no CUDA card here.")
    monkeypatch.setattr(sys, "argv", ["benchmark", "--list"])
    assert exact.main() == 0
    assert set(capsys.readouterr().out.split()) >= {"reward", "updates", "varlen"}


def test_tiny_rows_of_ours_by_each_way_that_runs_here(tmp_path, monkeypatch, capsys):
    path = tmp_path / "out.json"
    words = ["--device", "cpu", "--scale", "tiny", "--rows", "update/dualkv-", "--output", str(path)]
    monkeypatch.setattr(sys, "argv", ["speed.py", *words])
    monkeypatch.setattr(speed.runner, "ask", in_this_process)
    assert speed.main() == 0, capsys.readouterr().out
    found = {one["row"].split("-")[1].split("/")[0]: one for one in json.loads(path.read_text())["rows"]}
    assert {way: one["status"] for way, one in found.items()} == {
        **dict.fromkeys(("fa3", "fa4"), "skipped"),
        **dict.fromkeys(("keep", "fewer", "all"), "measured"),
    }
    assert all(found[way]["kernels"].startswith("attention: sdpa") for way in ("keep", "fewer", "all"))


@pytest.mark.parametrize("kind", ["update/tail", "step/dualkv"])
def test_tiny_rows_of_trl_and_ours_go_through_the_whole_benchmark(kind, tmp_path, monkeypatch, capsys):
    path = tmp_path / "out.json"
    words = ["--device", "cpu", "--scale", "tiny", "--rows", f"{kind}/", "--output", str(path)]
    monkeypatch.setattr(sys, "argv", ["speed.py", *words])
    monkeypatch.setattr(speed.runner, "ask", in_this_process)
    assert speed.main() == 0, capsys.readouterr().out
    result = json.loads(path.read_text())
    trl, ours, unsloth = result["rows"]
    for one in (trl, ours):
        assert one["status"] == "measured", one
        assert one["phases"]["update"] > 0 and one["mfu"] is None and one["scale"] == "a toy"
        assert one["measured"]["seconds"]["update"] == pytest.approx(one["phases"]["update"], abs=1e-3)
        assert one["predicted"]["seconds"].keys() == one["measured"]["seconds"].keys() - {"scoring"}
        assert one["phases"]["generate"] > 0.001 or kind.startswith("update")
        assert sum(one["phases"].values()) == pytest.approx(one["step_s"], rel=0.05, abs=0.01)
    assert ours["packed"] and not trl["packed"] and ours["forwarded_tokens"] > 0
    assert unsloth["status"] == "skipped" and unsloth["reason"] == "unsloth is not installed."
    assert result["summary"]["faster_than"].keys() == {f"{kind}/trl"}


@pytest.mark.nightly
def test_tiny_rows_of_the_clock_go_through_the_whole_benchmark(tmp_path, monkeypatch, capsys):
    pytest.importorskip("peft")
    path = tmp_path / "out.json"
    words = ["--device", "cpu", "--scale", "tiny", "--rows", "lora-256", "full-", "overhead-2", "clock/generate"]
    monkeypatch.setattr(sys, "argv", ["speed.py", *words, "--output", str(path)])
    monkeypatch.setattr(speed.runner, "ask", in_this_process)
    assert speed.main() == 0, capsys.readouterr().out
    found = {one["row"].split("/")[1]: one for one in json.loads(path.read_text())["rows"]}
    assert found.keys() == {"lora-256", "full-2048", "overhead-2", "generate"}
    for name, one in found.items():
        assert one["status"] == "measured", one
        assert one["packed"] and one["measured"]["seconds"]["update"] > 0 < one["predicted"]["seconds"]["update"]
        assert ("generation" in one["measured"]["seconds"]) == (name == "generate")
    assert found["lora-256"]["update_tflop"] <= found["full-2048"]["update_tflop"]


@pytest.mark.nightly
def test_tiny_rows_of_peers_and_of_the_reward_model_go_through_the_whole_benchmark(tmp_path, monkeypatch, capsys):
    pytest.importorskip("peft")
    path = tmp_path / "out.json"
    words = ["--device", "cpu", "--scale", "tiny", "--rows", "1.7B/", "prime", "reward/", "--output", str(path)]
    monkeypatch.setattr(sys, "argv", ["speed.py", *words])
    monkeypatch.setattr(speed.runner, "ask", in_this_process)
    assert speed.main() == 0, capsys.readouterr().out
    found = {one["row"]: one for one in json.loads(path.read_text())["rows"]}
    assert len(found) == 6
    for name, one in found.items():
        assert one["status"] == "measured", one
        assert one["packed"] == name.endswith("trl_ext") and one["tokens_per_s_verl"] > one["tokens_per_s"] > 0
        assert ("published" in one) == name.startswith("peers/")
        assert one["measured"]["seconds"]["update"] > 0 < one["predicted"]["allocated"]


def test_nobody_forgets_the_peaks_that_a_row_reads(monkeypatch):
    class Card(FakeCard):
        def reset(self):
            resets.append(self)

    resets = []
    monkeypatch.setattr(rehearsal, "source_of", lambda device: Card())
    (row,) = runner.chosen(rows("tiny", None, None), ["update/tail/trl_ext"])
    assert speed_worker.train(row, "cpu")["packed"]
    assert not resets


def in_this_process(command, limit_s, variables):
    """What a row's worker would answer: importing the libraries again would take longer than the row."""
    return speed_worker.work(*speed_worker.load(command[-1]))


def test_the_tests_of_a_file_come_back_by_name(tmp_path, monkeypatch):
    path = tmp_path / "test_toy.py"
    path.write_text(
        "import pytest\n"
        "def test_llama_holds(): pass\n"
        "def test_llama_breaks(): assert 1 == 2, 'made up'\n"
        "@pytest.mark.skip(reason='no card')\n"
        "def test_llama_waits(): pass\n"
        "def test_of_another_family(): pass\n"
    )
    found = exact.run_row(exact.Row(path), "cpu", "tiny", 60)
    assert (found["status"], found["passed"], found["reason"]) == ("failed", 1, "1 tests failed.")
    assert found["skipped_tests"] == {"test_llama_waits": "no card"}
    assert "made up" in found["failed_tests"]["test_llama_breaks"]
    assert exact.summary([found]) == {"tests_passed": 1, "tests_failed": 1, "tests_skipped": 1}
