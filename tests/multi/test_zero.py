"""Two processes under every launch file that we ship train the same weights as one plain process, to 1e-6.

The plain process pads, the launched ones pack and share prompts: what holds here holds for both at once. All runs are
on the CPU in fp32, over gloo, on a tiny random Llama. A run takes about 10 s, nearly all of it imports; DeepSpeed
compiles a helper in its first run on a machine, and its CPU Adam in the first one that offloads (a minute each).
"""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("zero_worker.py")
YAMLS = {path.stem: path for path in sorted((ROOT / "accelerate_configs").glob("*.yaml"))}
JSONS = {path.stem: path for path in sorted((ROOT / "deepspeed_configs").glob("*.json"))}
HIDDEN_SIZE = 64
TOLERANCE = 1e-6
TIMEOUT_S = 300  # a run that compiles first takes 60

ENVIRONMENT = os.environ | {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    "TOKENIZERS_PARALLELISM": "false",
    "TRL_EXPERIMENTAL_SILENCE": "1",
}


@dataclass(frozen=True)
class Run:
    """What a finished worker left behind."""

    facts: dict
    weights: dict

    def distance(self, other: "Run") -> float:
        """The largest difference of any two weights that belong together."""
        assert self.weights.keys() == other.weights.keys()
        return max((self.weights[name] - other.weights[name]).abs().max().item() for name in self.weights)


def run_worker(command, model, output_dir, num_processes, *options) -> Run:
    """Run the worker to its end, or fail with the tail of its log."""
    command = [*command, WORKER, "--model", model, "--output_dir", output_dir, "--num_processes", num_processes]
    command = list(map(str, [*command, *options]))
    log = output_dir.with_suffix(".log")
    with log.open("w") as file, subprocess.Popen(command, env=ENVIRONMENT, stdout=file, stderr=file) as process:
        try:
            code = process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.terminate()  # and not kill: the launcher stops its workers when it is asked to end
            code = f"none after {TIMEOUT_S} s"
    if code != 0:
        pytest.fail(f"exit code {code} from {' '.join(command)}\n{log.read_text()[-6000:]}", pytrace=False)
    weights = load_file(output_dir / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    return Run(json.loads((output_dir / "facts.json").read_text()), weights)


def launched(yaml_name: str, num_processes: int) -> list:
    # Port 0 lets accelerate choose a free one.
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", 0]
    return [*launcher, "--num_processes", num_processes, "--config_file", YAMLS[yaml_name]]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A folder with a random Llama and a tokenizer that knows 196 words."""
    folder = tmp_path_factory.mktemp("tiny_model")
    words = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"w{i}" for i in range(196))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", unk_token="<unk>"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=HIDDEN_SIZE,
        # ZeRO-3 leaves matrices below 1e5 entries whole (stage3_param_persistence_threshold); these have 131072.
        intermediate_size=2048,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def plain(tiny_model, tmp_path_factory):
    """One process, no launcher, padded batches."""
    return run_worker([sys.executable], tiny_model, tmp_path_factory.mktemp("plain") / "out", 1)


def check_against(plain: Run, run: Run, name: str) -> None:
    print(f"largest weight difference: {run.distance(plain):.1e}")  # pytest -rP shows it
    stage = int(name[4]) if name.startswith("zero") else 0
    assert run.facts["world_size"] == 2
    assert run.facts["zero_stage"] == stage
    assert (run.facts["num_split_parameters"] > 0) == (stage == 3)
    assert run.facts["optimizer"] == ("DeepSpeedCPUAdam" if name.endswith("_offload") else "AdamW")
    assert run.facts["prompts_of_steps"] == plain.facts["prompts_of_steps"]
    assert min(run.facts["padded_over_forwarded"]) > 1
    assert run.distance(plain) <= TOLERANCE


def skip_what_cannot_run(name: str) -> None:
    if name.startswith("zero"):
        pytest.importorskip("deepspeed")
    if name.endswith("_offload") and not (shutil.which("c++") and shutil.which("ninja")):
        pytest.skip("DeepSpeed cannot compile its CPU Adam here: needs c++ and ninja")


def test_the_plain_run_moves_the_weights_and_clips_every_step(plain, tiny_model):
    before = Run({}, load_file(tiny_model / "model.safetensors"))
    assert plain.distance(before) > 1e4 * TOLERANCE
    assert len(plain.facts["grad_norms"]) == 3
    assert min(plain.facts["grad_norms"]) > 3 * plain.facts["max_grad_norm"]


def test_a_run_that_loses_its_clipping_would_be_noticed(plain, tiny_model, tmp_path):
    unclipped = run_worker([sys.executable], tiny_model, tmp_path / "out", 1, "--max_grad_norm", 1e9)
    assert unclipped.distance(plain) > 1e3 * TOLERANCE


def test_single_gpu_yaml_changes_nothing(plain, tiny_model, tmp_path):
    run = run_worker(launched("single_gpu", 1), tiny_model, tmp_path / "out", 1)
    assert run.facts["world_size"] == 1
    assert run.distance(plain) == 0


# multi_gpu.yaml says word for word what cpu.yaml says (tests/light/test_configs.py).
@pytest.mark.parametrize("name", [name for name in YAMLS if name not in ("single_gpu", "multi_gpu")])
def test_two_processes_train_what_one_does(name, plain, tiny_model, tmp_path):
    skip_what_cannot_run(name)
    run = run_worker(launched(name, 2), tiny_model, tmp_path / "out", 2, "--packing")
    check_against(plain, run, name)


@pytest.mark.parametrize("name", JSONS)
def test_two_processes_train_what_one_does_with_a_deepspeed_file(name, plain, tiny_model, tmp_path):
    skip_what_cannot_run(name)
    options = ("--packing", "--deepspeed", JSONS[name])
    run = run_worker(launched("cpu", 2), tiny_model, tmp_path / "out", 2, *options)
    check_against(plain, run, name)
    # Where the file says "auto" the model's width has taken its place.
    assert run.facts["reduce_bucket_size"] == HIDDEN_SIZE**2
