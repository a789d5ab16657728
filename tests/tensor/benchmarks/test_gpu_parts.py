"""The parts that measure rows by their names: a step's kernels by group, attention and layers, the quickstart."""

import json
import os
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from benchmarks.gpu import kernels, preflight, prof, quickstart, runner
from benchmarks.quickstart.model import GGUF, joined
from benchmarks.quickstart.race import HeldOut
from tests import tiny

TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


@pytest.fixture
def measured(tmp_path, monkeypatch, capsys):
    """Runs rows of a part at the scale of a toy; returns their records by name."""

    def call(part, *rows):
        path = tmp_path / "out.json"
        words = ["--device", "cpu", "--scale", "tiny", "--rows", *rows, "--output", str(path)]
        monkeypatch.setattr(sys, "argv", ["part", *words])
        monkeypatch.setattr(runner, "ask", preflight.in_this_process)
        monkeypatch.setattr(preflight.os, "environ", dict(os.environ))
        with pytest.raises(SystemExit) as ended:
            preflight.runpy.run_module(part.__name__, run_name="__main__")
        said = capsys.readouterr().out
        assert ended.value.code == 0, said
        found = {one["row"]: one for one in json.loads(path.read_text())["rows"]}
        assert all(one["says"] in said for one in found.values() if one["status"] == "measured")
        return found

    return call


# A step's kernels ---------------------------------------------------------------------------------------------------


def event(name, begin_us, end_us, *kernels_of_it, on_card=False, parent=None):
    made = [SimpleNamespace(name=kernel, duration=us) for kernel, us in kernels_of_it]
    kind = DeviceType.CUDA if on_card else DeviceType.CPU
    run = SimpleNamespace(start=begin_us, end=end_us)
    about = {"is_user_annotation": False, "self_cpu_time_total": end_us - begin_us, "cpu_parent": parent}
    return SimpleNamespace(name=name, device_type=kind, time_range=run, kernels=made, **about)


def test_kernels_are_grouped_by_what_is_around_them_and_what_none_fills_is_idle():
    head = event("ChunkedLogProbFunctionBackward", 0, 5)
    host = [
        event("aten::mm", 0, 5, ("nvjet_tst_128x256", 30)),
        event("aten::mm", 0, 5, ("nvjet_tst_128x256", 20), parent=head),
        event("aten::mul", 0, 5, ("vectorized_elementwise_kernel", 10)),
        event("aten::_flash_attention_backward", 0, 5, ("flash_bwd_kernel", 15)),
    ]
    # Two at once for 10 us, nothing between 70 and 75, one that no operation started.
    runs = ((0, 30), (20, 40), (40, 50), (50, 65), (65, 70), (75, 80))
    card = [event("a kernel", *run, on_card=True) for run in runs]
    found = prof.shares([*host, *card], 100e-6)
    assert found["share"] == {"gemm": 0.3, "head": 0.2, "attention": 0.15, "elementwise": 0.1, "unknown": 0.1}
    assert found["idle_share"] == 0.25 and found["kernels"] == 6
    assert found["says"].endswith("unknown 10%; idle 25%")


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("Optimizer.step#AdamW.step", "optimizer"),
        ("_chunked_logprob_kernel", "head"),
        ("pytorch_flash::flash_fwd_kernel", "attention"),
        ("_MergedBackward", "attention"),
        ("sm90_xmma_gemm_bf16", "gemm"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("aten::index_select", "copies"),
        ("aten::silu_backward", "elementwise"),
        ("aten::native_layer_norm", "elementwise"),
    ],
)
def test_the_groups_know_the_names_of_kernels(name, group):
    assert prof.group_of(event(name, 0, 1)) == group


def test_a_step_of_a_toy_is_profiled(measured):
    (one,) = measured(prof, "prof/update/tail").values()
    assert one["status"] == "measured", one
    # The profiler sees the packed forward, its head, and the optimizer.
    assert all(one["share"][group] > 0 for group in ("gemm", "attention", "head", "optimizer", "elementwise"))
    assert 0 < sum(one["share"].values()) + one["idle_share"] < 1.5 and one["kernels"] > 100


# Attention and layers -----------------------------------------------------------------------------------------------


def test_each_kernel_is_measured_and_held_against_float32(measured):
    found = measured(kernels, "attention/1024+8x512")
    for kernel in ("copies", "merged"):
        one = found[f"attention/1024+8x512/{kernel}"]
        assert one["status"] == "measured" and 0 < one["error"] < 0.02
        # Two and a half times a forward's operations.
        rates = one["backward_tflops"] * one["backward_ms"], one["forward_tflops"] * one["forward_ms"]
        assert rates[0] == pytest.approx(2.5 * rates[1])
    for version in (3, 4):
        for way in ("", "-merged"):
            one = found[f"attention/1024+8x512/flash_attention_{version}{way}"]
            assert one == {**one, "status": "skipped", "reason": f"flash-attn-{version} is not installed."}


def test_an_attention_that_is_wrong_has_an_error_that_shows(monkeypatch):
    def blind(query, key, value, table, **how):
        return kernels.sdpa_attention(query, key, value * 1.5, table, **how)

    assert kernels.of_attention(blind, 32, [8] * 4, "cpu")["error"] > 0.4


def test_layers_are_dualkvs_four_with_the_prompt_once_or_in_each_row(measured):
    assert list(kernels.LAYERS.values()) == [(5059, 32), (8192, 16), (16_384, 8), (32_768, 4)]
    prompt, owns = kernels.drawn(8192, 16)
    assert prompt == 8192 and len(owns) == 16 and 131 <= min(owns) <= max(owns) <= 2048
    found = measured(kernels, "layer/8192x16")
    once, copies = (found[f"layer/8192x16/{layout}"] for layout in ("once", "copies"))
    assert (once["tokens"], copies["tokens"]) == (32 + 4 * 8, 4 * (32 + 8))
    assert min(once["forward_ms"], once["backward_ms"], copies["forward_ms"]) > 0


# The quickstart -----------------------------------------------------------------------------------------------------


def chat_tokenizer(words=None):
    made = tiny.tokenizer(words)
    made.chat_template = TEMPLATE
    return made


@pytest.fixture
def assets(tmp_path, monkeypatch):
    """A toy in the place of the quickstart's model, and two problems in that of its data."""
    monkeypatch.setenv("TRL_EXT_CACHE", str(tmp_path))
    folder = tmp_path / "quickstart"
    tiny.model("llama").save_pretrained(folder / "model")
    chat_tokenizer().save_pretrained(folder / "model")
    (folder / "data").mkdir()
    rows = [{"prompt": [{"role": "user", "content": tiny.words(5, 6, i)}], "answer": str(i)} for i in range(7, 9)]
    for split in ("train", "test"):
        (folder / "data" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_both_trainers_run_the_recipe_and_are_asked_held_out_problems(assets, measured):
    found = measured(quickstart, "quickstart/42/")
    assert found.keys() == {"quickstart/42/trl", "quickstart/42/trl_ext"}
    for one in found.values():
        assert one["status"] == "measured", one
        steps, seconds, shares = zip(*one["curve"], strict=True)
        assert list(steps) == [0, 1, 2] and seconds[0] == 0 < seconds[1] < seconds[2] == one["seconds"]
        assert all(0 <= share <= 1 for share in shares)


def test_held_out_answers_are_counted_by_the_recipes_rule():
    words = chat_tokenizer({str(number): number for number in range(10)} | {"<pad>": 10, "<eos>": 11})
    prompts = [[{"role": "user", "content": text}] for text in ("1 2", "3")]
    model = SimpleNamespace(training=True, device="cpu", eval=lambda: None, train=lambda mode: None)
    model.generate = lambda input_ids, num_return_sequences, **how: torch.cat(
        [input_ids.repeat_interleave(num_return_sequences, 0), torch.full((2 * num_return_sequences, 1), 7)], dim=1
    )
    rule = {"rule": "answer", "gold": "answer", "kind": "number"}
    held_out = HeldOut({"prompt": prompts, "answer": ["7", "8"]}, words, rule, 1, 1)
    held_out.on_train_begin(None, SimpleNamespace(global_step=0), None, model=model)
    assert held_out.curve == [(0, 0.0, 0.5)]


def test_without_a_model_it_is_skipped_and_says_where_one_belongs(tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_EXT_CACHE", str(tmp_path))
    monkeypatch.delenv(GGUF, raising=False)
    found = quickstart.work("quickstart/42/trl", "cpu", "tiny")
    assert found["status"] == "skipped" and str(tmp_path) in found["reason"] and GGUF in found["reason"]


def test_a_model_that_came_in_pieces_is_one_file_again(tmp_path):
    pieces = [tmp_path / name for name in "ab"]
    for number, piece in enumerate(pieces):
        piece.write_bytes(bytes([number]) * 5)
    assert joined([str(piece) for piece in pieces], tmp_path).read_bytes() == b"\0" * 5 + b"\1" * 5
