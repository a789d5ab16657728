"""The doctor: machines written down as facts, and what he says of them."""

import json
import re
import subprocess
import sys
import tomllib
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

from tests.conftest import ROOT
from trl_ext.cli.check import command as cli
from trl_ext.cli.plan.command import plan as plan_command
from trl_ext.compat.versions import SUPPORTED
from trl_ext.doctor import Disk, Facts, Gpu, Kernels, examine, installed, look
from trl_ext.doctor.examine import HARMS, OLD_NAME
from trl_ext.doctor.finding import all_well
from trl_ext.doctor.look import hardware_of, known_card, read_answer, read_cards, shown_by
from trl_ext.errors import ConfigError
from trl_ext.memory import Job, estimate, find_card, find_shape, parse_gpus, plan, write_plan
from trl_ext.memory.job import changed
from trl_ext.memory.units import gib

A40 = Gpu("NVIDIA A40", 44.4, 44.0, (8, 6), "GPU-a")
HEALTHY = Facts(
    gpus=(A40,) * 4,
    driver="570.1",
    driver_cuda="12.8",
    has_nvlink=False,
    has_peer_access=True,
    versions={
        "torch": "2.13.0+cu128",
        "transformers": "5.23.0",
        "trl": "1.16.0",
        "accelerate": "1.15.0",
        "datasets": "5.2.0",
        "peft": "0.21.2",
        "deepspeed": "0.19.8",
        "vllm": "0.31.0",
        "bitsandbytes": "0.48.0",
        "flash-attn": None,
    },
    vllm_window=">=0.22.0,<=0.31.0",
    vllms_transformers=">=5.10.4",
    kernels=Kernels("12.8", 4, "2.27.3", {"sdpa": "", "varlen": "", "flash-attn": "not installed"}),
    compiler="/usr/bin/c++",
    ninja="/usr/bin/ninja",
    host_total_gib=512.0,
    host_free_gib=480.0,
    disks=(Disk("output", "/out", 900.0), Disk("model cache", "/cache", 900.0), Disk("shared memory", "/dev/shm", 64)),
    environment={OLD_NAME: "expandable_segments:True"},
    sandbox=(2, ""),
)

HOPPER, BLACKWELL = (replace(HEALTHY, gpus=(replace(A40, capability=(major, 0)),) * 4) for major in (9, 10))


def test_a_card_with_its_faster_attention_lacks_nothing():
    for card, packages in ((HOPPER, ("flash-attn-3", "kernels", "flash-attn-4")), (BLACKWELL, ("flash-attn-4",))):
        for package in packages:
            facts = replace(card, versions={**card.versions, package: "1.0"})
            assert "attention" not in words(facts, "note"), package
    with_version_3 = replace(BLACKWELL, versions={**BLACKWELL.versions, "flash-attn-3": "1.0"})
    assert "pip install flash-attn-4" in words(with_version_3, "note"), "version 3 is for Hopper"
    assert "attention" not in words(HEALTHY, "note")


def llama_plan(gpus="4xA40-48GB", **settings):
    return plan("grpo", "8B", gpus, **{"zero_stage": 2, "method": "lora", **settings}).best


def levels(facts, subject, planned=None):
    return {finding.level for finding in examine(facts, planned) if finding.subject.startswith(subject)}


def words(facts, level, planned=None):
    return " ".join(f"{f.subject}: {f.what} {f.advice}" for f in examine(facts, planned) if f.level == level)


def with_versions(**changes):
    return replace(
        HEALTHY, versions={**HEALTHY.versions, **{name.replace("_", "-"): v for name, v in changes.items()}}
    )


def with_environment(**variables):
    return replace(HEALTHY, environment={**HEALTHY.environment, **variables})


# Judging ----------------------------------------------------------------------------------------------------------


def test_a_machine_without_a_card_is_a_note_and_a_healthy_one_has_one_on_its_links():
    assert words(HEALTHY, "problem") == ""
    assert [f.subject for f in examine(HEALTHY) if f.level == "note"] == ["links"]
    facts = Facts(no_gpus="there is no NVIDIA driver", versions=HEALTHY.versions)
    assert levels(facts, "cards") == {"note"}
    assert all_well(examine(facts))


def test_every_finding_is_a_sentence_with_a_known_level():
    machines = [HEALTHY, Facts(no_gpus="there is no NVIDIA driver"), replace(HEALTHY, kernels=None, no_kernels="boom")]
    for finding in (found for facts in machines for found in examine(facts, llama_plan())):
        assert finding.level in ("ok", "note", "problem")
        assert finding.what.endswith(".") and not finding.what.endswith("..")
        assert not finding.advice or finding.advice[0].isalpha() or finding.advice[0] == "`"


@pytest.mark.parametrize(
    ("facts", "subject", "words_said"),
    [
        (replace(HEALTHY, gpus=(A40, A40, A40, replace(A40, name="NVIDIA A100"))), "cards", "3 x NVIDIA A40"),
        (replace(HEALTHY, gpus=(A40,) * 3 + (replace(A40, free_gib=10.0),)), "cards", "34.4 of 44.4 GiB are taken"),
        (replace(HEALTHY, gpus=(replace(A40, is_split=True),) * 4), "cards", "MIG"),
        (replace(HEALTHY, gpus=(replace(A40, capability=(7, 0)),) * 4), "cards", "no bf16 units"),
        (HOPPER, "attention", "flash-attention 3 or 4 is not installed. Faster on long rows: pip install kernels"),
        (BLACKWELL, "attention", "flash-attention 4 is not installed. Faster on long rows: pip install flash-attn-4"),
        (replace(HEALTHY, has_peer_access=False), "links", "Avoid ZeRO-3"),
        (replace(HEALTHY, has_nvlink=None), "links", "does not report"),
        (with_versions(vllm="0.9.0"), "versions", "pip install 'vllm>=0.22.0,<=0.31.0'"),
        (
            replace(HEALTHY, vllms_transformers=">=5.10.4,<5.18"),
            "versions",
            "vllm 0.31.0 takes transformers >=5.10.4,<5.18; 5.23.0 is installed. "
            "pip install 'transformers>=5.10.4,<5.18'",
        ),
        (replace(HEALTHY, compiler=None), "compiler", "Not on the PATH: a C++ compiler,"),
        (replace(HEALTHY, ninja=None), "compiler", "Not on the PATH: ninja,"),
        (replace(HEALTHY, host_free_gib=8.0), "host memory", "8 of 512 GiB"),
        (replace(HEALTHY, disks=(Disk("shared memory", "/dev/shm", 0.06),)), "shared memory", "--shm-size"),
        (replace(HEALTHY, disks=(Disk("output", "/out", 12.0),)), "disk", "12 GiB free"),
        (replace(HEALTHY, environment={}), "allocator", "export PYTORCH_CUDA_ALLOC_CONF"),
        (
            replace(HEALTHY, environment={"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
            "allocator",
            "under PYTORCH_ALLOC_CONF alone",
        ),
        (replace(HEALTHY, sandbox=(1, "namespaces: no")), "sandbox", "at L1, not at L2 (namespaces: no). L1 is what"),
        (replace(HEALTHY, sandbox=(0, "seccomp: no")), "sandbox", "refused here (seccomp: no). L1 needs Linux 5.13"),
        (replace(HEALTHY, sandbox=(-1, "no Linux")), "sandbox", "is refused here (no Linux)"),
        (with_environment(NCCL_P2P_DISABLE="1"), "environment", "NCCL_P2P_DISABLE=1"),
        (with_environment(NCCL_DEBUG="info"), "environment", "Every rank prints"),
        (with_environment(NCCL_SOCKET_IFNAME="lo"), "environment", "loopback"),
        (with_environment(TORCH_NCCL_ASYNC_ERROR_HANDLING="0"), "environment", "wait for ever"),
    ],
)
def test_what_hurts_is_a_note_with_its_number_and_a_remedy(facts, subject, words_said):
    notes = [f for f in examine(facts) if f.level == "note" and f.subject.startswith(subject)]
    assert words_said in " ".join(f"{f.what} {f.advice}" for f in notes)
    assert all_well(examine(facts))


@pytest.mark.parametrize(
    ("facts", "words_said"),
    [
        (with_versions(trl="1.15.0"), "pip install 'trl>=1.16,<2'"),
        (with_versions(trl="2.0.0"), "pip install 'trl>=1.16,<2'"),
        (with_versions(torch="2.10.0+cu128"), "torch 2.10.0+cu128 is outside the window >=2.11"),
        (with_versions(peft=None), "peft is not installed"),
        (replace(HEALTHY, kernels=Kernels(None, 0)), "built without CUDA"),
        (replace(HEALTHY, kernels=Kernels("13.0", 0)), "up to CUDA 12.8; PyTorch is built for CUDA 13.0"),
        (replace(HEALTHY, kernels=Kernels("12.8", 3)), "the driver shows 4 cards and PyTorch sees 3"),
        (replace(HEALTHY, kernels=None, no_kernels="libc10.so is gone"), "libc10.so is gone"),
        (replace(HEALTHY, kernels=Kernels("12.8", 4, "2", {"sdpa": "no kernel image"})), "no kernel image"),
        (replace(HEALTHY, disks=(Disk("output", "/out", 0.2),)), "0.2 GiB free at /out"),
        (replace(HEALTHY, disks=(Disk("model cache", "/cache", 99.0, False),)), "Set HF_HOME"),
    ],
)
def test_what_stops_a_run_is_a_problem(facts, words_said):
    assert words_said in words(facts, "problem")


def test_a_newer_version_than_tested_is_a_note_and_one_that_lacks_a_seam_a_problem(monkeypatch):
    monkeypatch.setattr(installed, "untested", lambda: {"trl": "1.17.0"})
    monkeypatch.setattr(installed, "seam_problem", lambda: "")
    (found,) = installed.untested_findings()
    assert found.level == "note" and "(tested: up to 1.16)" in found.what
    monkeypatch.setattr(installed, "seam_problem", lambda: "It is gone. Run: pip install 'trl==1.16.*'")
    facts = replace(HEALTHY, untested=installed.untested_findings())
    assert "versions: It is gone. pip install 'trl==1.16.*'" in words(facts, "problem")


def test_the_transformers_that_belongs_to_vllm_is_named():
    assert "versions: vllm 0.31.0 takes transformers >=5.10.4; 5.23.0 is installed." in words(HEALTHY, "ok")
    without = words(replace(with_versions(vllm=None), vllms_transformers=""), "ok")
    assert "The extra `vllm` resolves to vllm 0.31.0, transformers 5.17.0, torch 2.13.0." in without


def test_every_harm_can_be_triggered_and_harmless_values_pass():
    harmless = {"NCCL_P2P_DISABLE": "0", "NCCL_DEBUG": "WARN", "NCCL_SOCKET_IFNAME": "eth0"}
    assert levels(with_environment(**harmless), "environment") == {"ok"}
    examples = {"NCCL_DEBUG": "INFO", "NCCL_SOCKET_IFNAME": "lo", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    examples |= {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    for name in HARMS:
        assert levels(with_environment(**{name: examples.get(name, "1")}), "environment") == {"note"}, name


# A plan -----------------------------------------------------------------------------------------------------------


def test_a_plan_for_this_machine_can_run_and_what_it_lacks_a_little_of_is_noted():
    assert levels(HEALTHY, "plan", llama_plan()) == {"ok"}
    assert "can run here" in words(HEALTHY, "ok", llama_plan())
    assert levels(with_versions(deepspeed=None), "plan", llama_plan(zero_stage=0)) == {"ok"}
    planned = llama_plan(method="full", offload="optimizer")
    assert "OMP_NUM_THREADS" in words(HEALTHY, "note", planned)
    assert "OMP_NUM_THREADS" not in words(with_environment(OMP_NUM_THREADS="8"), "note", planned)
    facts = replace(HEALTHY, disks=(Disk("output", "/out", 100.0),))
    assert "A checkpoint with its optimizer takes 105 GiB" in words(facts, "note", planned)
    assert levels(HEALTHY, "plan", planned) == {"ok", "note"}


@pytest.mark.parametrize(
    ("facts", "settings", "words_said"),
    [
        (replace(HEALTHY, gpus=(A40,) * 2), {}, "cards found here: 2"),
        (Facts(no_gpus="none", versions=HEALTHY.versions), {}, "cards found here: 0"),
        (replace(HEALTHY, gpus=(replace(A40, total_gib=15.0),) * 4), {}, "card 0 has 13.8 usable"),
        (replace(HEALTHY, gpus=(A40,) * 3 + (replace(A40, free_gib=5.0),)), {}, "card 3 has 3.8 usable now"),
        (replace(HEALTHY, gpus=(replace(A40, capability=(7, 5)),) * 4), {}, "bf16, which card 0 does not support"),
        (with_versions(deepspeed=None), {}, "ZeRO-2; deepspeed is missing"),
        (with_versions(bitsandbytes=None), {"method": "qlora"}, "bitsandbytes is missing"),
        (with_versions(vllm=None), {"use_vllm": True}, "use_vllm; vllm is missing"),
        (replace(HEALTHY, compiler=None), {"method": "full", "offload": "optimizer"}, "no C++ compiler"),
        (replace(HEALTHY, ninja=None), {"method": "full", "offload": "optimizer"}, "ninja, which builds"),
        (replace(HEALTHY, host_free_gib=20.0), {}, "GiB of host memory (estimated), and 20 are free"),
        (
            replace(HEALTHY, disks=(Disk("output", "/out", 5.0),)),
            {"method": "full", "offload": "optimizer"},
            "trained weights take 15 GiB",
        ),
    ],
)
def test_a_plan_that_cannot_run_here_says_why(facts, settings, words_said):
    planned = llama_plan(**settings)
    assert words_said in words(facts, "problem", planned)
    assert "can run here" not in words(facts, "ok", planned)


# Looking ----------------------------------------------------------------------------------------------------------


class NVMLError(Exception):
    pass


class Driver(SimpleNamespace):
    """As much of pynvml as is asked, over two cards without NVLink."""

    NVMLError = NVMLError
    nvmlMemory_v2 = 2
    NVML_P2P_CAPS_INDEX_READ, NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK = 0, 2, 0

    def __getattr__(self, name):
        answers = {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlDeviceGetCount": lambda: 2,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}f".encode(),
            "nvmlDeviceGetName": lambda handle: b"NVIDIA A40",
            "nvmlSystemGetDriverVersion": lambda: "570.1",
            "nvmlSystemGetCudaDriverVersion_v2": lambda: 12080,
            "nvmlDeviceGetP2PStatus": lambda one, other, kind: 0 if kind == 0 else 5,
            "nvmlDeviceGetMemoryInfo": self._memory,
            "nvmlDeviceGetCudaComputeCapability": lambda handle: (8, 6),
            "nvmlDeviceGetMigMode": self._refuse,
            "nvmlDeviceGetMaxMigDeviceCount": self._refuse,
            "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": self._refuse,
        }
        return answers[name]

    @staticmethod
    def _memory(handle, version=None):
        return SimpleNamespace(total=45 * 2**30, free=44 * 2**30, reserved=2**29)

    @staticmethod
    def _refuse(handle):
        raise NVMLError("not supported")


def test_what_the_driver_lists_is_read_and_one_card_has_no_link_to_judge():
    cards = read_cards(Driver(), None)
    assert cards.gpus[1] == Gpu("NVIDIA A40", 44.5, 44.0, (8, 6), "GPU-1f")
    assert (cards.driver, cards.driver_cuda) == ("570.1", "12.8")
    assert (cards.has_nvlink, cards.has_peer_access) == (False, True)
    cards = read_cards(Driver(), "1")
    assert len(cards.gpus) == 1 and cards.has_nvlink is None
    assert levels(replace(HEALTHY, gpus=cards.gpus, has_nvlink=None), "links") == set()


PARTS = {"a": 5, "b": 20}


class SplitDriver(Driver):
    """Two cards of 40 GiB. MIG splits the second into parts of 5 and 20 GiB, in places 1 and 2 of 7."""

    def __getattr__(self, name):
        whole = "NVIDIA A100-SXM4-40GB"
        answers = {
            "nvmlDeviceGetName": {0: whole, 1: whole},
            "nvmlDeviceGetUUID": {0: "GPU-0f", 1: "GPU-1f", "a": "MIG-a", "b": "MIG-b"},
            "nvmlDeviceGetMigMode": {0: (0, 0), 1: (1, 1)},
            "nvmlDeviceGetMaxMigDeviceCount": {0: 0, 1: 7},
            "nvmlDeviceGetMigDeviceHandleByIndex": {(1, 1): "a", (1, 2): "b"},
            "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": {"a": 1, "b": 1},
            "nvmlDeviceGetCudaComputeCapability": {0: (8, 0), 1: (8, 0)},
        }
        if name not in answers:
            return super().__getattr__(name)

        def answer(*asked):
            key = asked[0] if len(asked) == 1 else asked
            return answers[name][key] if key in answers[name] else self._refuse(key)

        return answer

    @staticmethod
    def _memory(handle, version=None):
        total = PARTS.get(handle, 40) * 2**30
        return SimpleNamespace(total=total, free=total, reserved=0)


def test_of_a_card_that_mig_splits_the_part_is_read_that_cuda_shows():
    cases = {
        # CUDA shows the first part alone, and no whole card with it.
        None: [("MIG-a", 5.0)],
        "0,1": [("MIG-a", 5.0)],
        "1": [("MIG-a", 5.0)],
        "GPU-1f": [("MIG-a", 5.0)],
        "0": [("GPU-0f", 40.0)],
        "MIG-b": [("MIG-b", 20.0)],
        "MIG-b,MIG-a": [("MIG-b", 20.0), ("MIG-a", 5.0)],
        "MIG-c": [],
    }
    for visible, found in cases.items():
        cards = read_cards(SplitDriver(), visible)
        assert [(gpu.uuid, gpu.total_gib) for gpu in cards.gpus] == found, visible
        assert [gpu.is_split for gpu in cards.gpus] == [uuid.startswith("MIG") for uuid, _ in found]
        assert bool(cards.no_gpus) is not bool(found)
    hardware = hardware_of(read_cards(SplitDriver(), "MIG-b").gpus, None, None)
    assert (hardware.num_gpus, hardware.card.name, hardware.card.total_gib) == (1, "A100-40GB", 20.0)


class UnequalDriver(Driver):
    """A small card before a large card, by PCI bus."""

    def __getattr__(self, name):
        if name == "nvmlDeviceGetName":
            return lambda handle: (b"NVIDIA GeForce RTX 3060", b"NVIDIA A40")[handle]
        return super().__getattr__(name)


def test_a_number_that_cuda_may_count_by_speed_is_refused_by_plans_and_noted(monkeypatch):
    machine = import_module("trl_ext.doctor.look")
    for visible, order, is_open in [
        ("1", None, True),
        ("1", "FASTEST_FIRST", True),
        ("1", "PCI_BUS_ID", False),
        ("1,0", None, False),  # all of them: the smallest bounds the plan
        ("GPU-1", None, False),
        (None, None, False),
    ]:
        cards = read_cards(UnequalDriver(), visible, order)
        assert cards.counts_by_speed is is_open, (visible, order)
        monkeypatch.setattr(machine, "look_at_cards", lambda cards=cards: cards)
        with pytest.raises(ConfigError, match="CUDA_DEVICE_ORDER=PCI_BUS_ID") if is_open else nullcontext():
            machine.this_machine()
        notes = words(replace(HEALTHY, gpus=cards.gpus, counts_by_speed=cards.counts_by_speed), "note")
        assert ("Set CUDA_DEVICE_ORDER=PCI_BUS_ID" in notes) is is_open
    assert not read_cards(Driver(), "1").counts_by_speed


def test_a_driver_that_does_not_answer_is_told():
    class Absent(Driver):
        def __getattr__(self, name):
            return lambda: (_ for _ in ()).throw(NVMLError("Driver Not Loaded"))

    cards = read_cards(Absent(), None)
    assert cards.gpus == () and "Driver Not Loaded" in cards.no_gpus


def test_visible_devices_are_read_as_cuda_reads_them():
    cases = {None: [0, 1], "1": [1], "1,0": [1, 0], "": [], "-1": [], "0,7,1": [0], "GPU-b": [1], "GPU": []}
    assert {visible: shown_by(visible, ["GPU-a", "GPU-b"]) for visible in cases} == cases
    assert [shown_by(visible, ["GPU-a"]) for visible in ("", ",0", "G", "GPU-ab")] == [[], [], [0], []]


def test_pynvml_has_every_name_that_we_ask_for():
    pynvml = pytest.importorskip("pynvml")
    source = (ROOT / "trl_ext/doctor/look.py").read_text()
    names = {word for word in source.replace("(", " ").replace(")", " ").replace(",", " ").replace(":", " ").split()}
    asked = {name.split(".")[1] for name in names if name.startswith("nvml.") and name.count(".") == 1}
    assert len(asked) > 10 and [name for name in asked if not hasattr(pynvml, name)] == []


def test_the_drivers_name_finds_the_card_of_the_table():
    cards = {
        "NVIDIA A40": "A40-48GB",
        "NVIDIA A100-SXM4-80GB": "A100-80GB",
        "NVIDIA A100-SXM4-40GB": "A100-40GB",
        "NVIDIA A100 80GB PCIe": "A100-PCIE-80GB",
        "NVIDIA H100 80GB HBM3": "H100-80GB",
        "NVIDIA H100 PCIe": "H100-PCIE-80GB",
        "NVIDIA GeForce RTX 4090": "RTX4090-24GB",
        "NVIDIA RTX A6000": "A6000-48GB",
        "NVIDIA RTX 6000 Ada Generation": "RTX6000Ada-48GB",
        "NVIDIA L40S": "L40S-48GB",
        "NVIDIA H200": "H200-141GB",
    }
    assert {name: known_card(name).name for name in cards} == cards


def test_cards_become_hardware_by_their_memory_and_by_the_smallest():
    hardware = hardware_of((Gpu("NVIDIA X9", 60.0, 60.0, (9, 9)),) * 2, True, True)
    assert (hardware.num_gpus, hardware.card.total_gib, hardware.card.link.is_fast) == (2, 60.0, True)
    with pytest.raises(ConfigError, match="--gpus"):
        hardware_of((), None, None)
    assert hardware_of((A40, replace(A40, total_gib=20.0)), None, None).card.total_gib == 20.0


def test_what_pytorch_answers_is_read_and_what_it_complains_about_told():
    line = json.dumps({"cuda": "12.8", "num_gpus": 1, "nccl": "2.27", "works": {"sdpa": ""}})
    assert read_answer(f"a warning\n{line}\n", "", 0) == (Kernels("12.8", 1, "2.27", {"sdpa": ""}), "")
    assert read_answer("", "Traceback\nImportError: libc10.so", 1) == (None, "ImportError: libc10.so")
    assert read_answer("", "", -11) == (None, "exit code -11")


def test_looking_works_on_this_machine_whatever_it_has(tmp_path):
    facts = look(str(tmp_path / "deep" / "out"), probe_s=0)
    assert facts.sandbox and facts.sandbox[0] in (-1, 0, 1, 2)
    assert facts.versions["trl"] and bool(facts.gpus) != bool(facts.no_gpus)
    assert {disk.purpose for disk in facts.disks} >= {"output", "model cache"}
    assert examine(facts)


@pytest.mark.parametrize(
    ("stat", "free_gib"),
    [
        ({"active_file": 300, "anon": 100, "inactive_file": 200}, 0.9),
        ({"active_file": 400, "inactive_file": 400}, 1.0),
        ({"anon": 600}, 0.4),
        # Of cgroup v1, where names without total_ leave out the groups below.
        ({"active_file": 1, "inactive_file": 1, "total_active_file": 300, "total_inactive_file": 200}, 0.9),
        (None, 0.4),
    ],
)
def test_the_page_cache_of_a_container_counts_as_free(tmp_path, monkeypatch, stat, free_gib):
    machine = import_module("trl_ext.doctor.look")  # the package's `look` is the function in it
    files = {"LIMITS": "1000", "USED": "600"}
    if stat is not None:
        files["STATS"] = "\n".join(f"{name} {value}" for name, value in stat.items())
    for name in ("LIMITS", "USED", "STATS"):
        monkeypatch.setattr(machine, f"_CGROUP_{name}", (str(tmp_path / "v2"), str(tmp_path / name)), raising=False)
    for name, text in files.items():  # thousandths of a GiB, so that any machine has more than the container
        (tmp_path / name).write_text(re.sub(r"\b\d+\b", lambda found: str(int(found[0]) * 2**30 // 1000), text))
    assert machine.host_memory() == (1.0, free_gib)


def test_windows_are_those_of_the_packages_own_requirements_and_vllms_is_trls():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    wanted = {r.name: r for r in map(Requirement, [*project["dependencies"], *optional["deepspeed"]])}
    wanted |= {r.name: r for r in map(Requirement, optional["flash-attn"])}
    for package, window in (installed.required_windows() | installed.optional_windows("")).items():
        if window:
            assert str(wanted[package].specifier) == str(Requirement(f"x{window}").specifier)
    assert installed.window_of("vllm", user="trl").startswith(("<", ">"))
    assert set(SUPPORTED) <= set(installed.versions())
    assert installed.holds(">=2.11", "2.11.0+cu128")
    assert not installed.holds(">=2.11", "2.10.1")


# The page for a run that has died ----------------------------------------------------------------------------------


PAGE = (ROOT / "docs" / "oom.md").read_text()
ASKED = "global_batch=64 per_device_train_batch_size=8 expandable_segments=false dtype=float32"
# DeepSpeed's own, where nothing is said.
BUCKETS = "reduce_bucket_size=500000000 stage3_max_live_parameters=1000000000 sub_group_size=1000000000"
RL_LENGTHS = "max_prompt_length=1024 max_completion_length=1024"
PAGE_JOBS = {
    "reward": "max_length=4096",
    "grpo": RL_LENGTHS,
    "ppo": f"{RL_LENGTHS} num_generations=1 beta=0.05 reward_model=copy",
}
PAGE_ROW = re.compile(r"\| (\+|or) \| .*? \| (?:`([^`]*)`)? ?\| ([\d.]+) \| ([\d,.]+) \|")


def pairs_of(text):
    return dict(pair.split("=") for pair in text.split())


@pytest.mark.parametrize(("place", "trainer"), enumerate(PAGE_JOBS))
def test_every_number_of_the_page_is_what_the_formulas_say_today(place, trainer):
    rows = [
        PAGE_ROW.fullmatch(line) for line in PAGE.split("### ")[1 + place].splitlines() if line[:3] in ("| +", "| o")
    ]
    assert len(rows) > 8 and None not in rows
    base = changed(Job(trainer), pairs_of(f"{ASKED} {BUCKETS} {PAGE_JOBS[trainer]}"))
    for mark, words_of_row, gib_told, seconds_told in (row.groups() for row in rows):
        job = changed(base, pairs_of(words_of_row or ""))
        base = job if mark == "+" else base
        found = estimate(job, find_shape("meta-llama/Llama-3.1-8B"), parse_gpus("8xA100-80GB"))
        assert gib(found.need_bytes) == pytest.approx(float(gib_told), abs=0.06), words_of_row
        assert found.in_seconds() == seconds_told, words_of_row


def test_the_page_opens_with_the_error_that_people_search_for_and_tells_what_a_card_has_for_tensors():
    for card in ("RTX4090-24GB", "A100-40GB", "A40-48GB", "A100-80GB"):
        assert f"{find_card(card).usable_gib:.1f}" in PAGE, card
    assert PAGE.splitlines()[4].startswith("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate")
    assert "**estimated**" in PAGE


@pytest.mark.slow
def test_the_plan_commands_of_the_page_are_accepted(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    lines = PAGE.replace("\\\n", " ").splitlines()
    commands = [line.partition(" #")[0].split()[2:] for line in lines if line.startswith("trl-ext plan")]
    assert len(commands) == 4
    for command in commands:
        assert plan_command(command) in (0, 1), command


# The command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch):
    """Let the command look at another machine."""

    def put(facts):
        monkeypatch.setattr("trl_ext.doctor.look", lambda output_dir: facts)

    return put


def test_the_command_prints_a_line_for_each_finding_and_json_of_findings_and_facts(machine, capsys):
    machine(HEALTHY)
    assert cli.doctor([]) == 0
    text = capsys.readouterr().out
    for subject in ("cards", "links", "driver", "versions", "attention", "compiler", "host memory", "allocator"):
        assert subject in text
    assert "4 x NVIDIA A40, 43.2 GiB usable each" in text
    machine(HEALTHY)
    assert cli.doctor(["--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] and answer["facts"]["gpus"][0]["name"] == "NVIDIA A40"
    assert answer["findings"][0].keys() == {"level", "subject", "what", "advice"}


def test_a_plan_that_cannot_run_exits_1_and_a_missing_one_is_a_sentence(machine, tmp_path, capsys):
    write_plan(llama_plan(), tmp_path)
    machine(HEALTHY)
    assert cli.doctor(["--plan", str(tmp_path)]) == 0
    machine(replace(HEALTHY, gpus=(A40,)))
    assert cli.doctor(["--plan", str(tmp_path / "plan.json")]) == cli.CANNOT_WORK
    assert "cards found here: 1" in " ".join(capsys.readouterr().out.split())
    machine(HEALTHY)
    with pytest.raises(ConfigError, match="There is no plan"):
        cli.doctor(["--plan", "nowhere"])


@pytest.mark.slow
def test_the_doctor_imports_nothing_heavy():
    heavy = ("torch", "trl", "transformers", "datasets", "numpy", "accelerate", "deepspeed")
    code = (
        "import sys, trl_ext.cli.check.command\nfrom trl_ext.doctor import examine, look\n"
        f"examine(look(probe_s=0)); print([m for m in {heavy} if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
