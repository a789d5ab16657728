"""Does a policy learn from samples of the step before as from its own? `generation_ahead: 1` against 0.

The quickstart's recipe, model and problems, in one process, with equal numbers of episodes. Servers stand in for
vLLM's: they sample by the weights that were pushed last, and give the log-probabilities of what they sampled. Both
settings correct by ratios per token, truncated at 2.

    python benchmarks/ahead_learning.py --output benchmarks/results/ahead_learning_cpu.json
"""

import argparse
import multiprocessing
import os
import statistics
import tempfile
import threading
import zlib
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from machine import save
from overlap import SleepingServers
from quickstart.assets import prepare
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, TrainerCallback
from trl.generation import vllm_generation

from trl_ext.scripts.grpo import main as grpo
from trl_ext.trainers.generation import vllm_servers

ANSWER = "rewards/answer/mean"


class SamplingServers(SleepingServers):
    """The client, with a model inside that samples. What it draws depends on seed, pushes and prompt alone."""

    folder, seed = "", 0

    def __init__(self, base_url: str, **kwargs: Any):
        super().__init__(base_url, **kwargs)
        self._policy = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()
        self._weights = dict(self._policy.named_parameters())
        self._pushes, self._lock = 0, threading.Lock()

    @torch.no_grad()
    def update_named_params(self, metadata: Any, named_params: Any) -> None:
        for name, weight in named_params:
            self._weights[name].copy_(weight)
        self._pushes += 1

    def _post(self, url: str, **kwargs: Any) -> dict[str, Any]:
        asked = kwargs["json"]
        of_length: dict[int, list[list[int]]] = {}
        for ids in asked["prompt"]:
            of_length.setdefault(len(ids), []).append(ids)
        found: dict[tuple[int, ...], list[dict[str, Any]]] = {}
        with self._lock:  # on the cores that train
            for alike in of_length.values():
                found |= zip(map(tuple, alike), self._choices(alike, asked), strict=True)
        return {"choices": [one for ids in asked["prompt"] for one in found[tuple(ids)]]}

    @torch.no_grad()
    def _choices(self, prompts: list[list[int]], asked: dict[str, Any]) -> list[list[dict[str, Any]]]:
        """Completions of prompts that are equally long."""
        num, ends = asked["n"], self._policy.config.eos_token_id
        draws = [
            torch.Generator().manual_seed(zlib.crc32(f"{self.seed}/{self._pushes}/{p}".encode())) for p in prompts
        ]
        now, past = torch.tensor([ids for ids in prompts for _ in range(num)]), None
        ids: list[list[int]] = [[] for _ in now]
        logps: list[list[float]] = [[] for _ in now]
        for _ in range(asked["max_tokens"]):
            out = self._policy(now, past_key_values=past, use_cache=True, logits_to_keep=1)
            past = out.past_key_values
            every = (out.logits[:, -1] / asked["temperature"]).log_softmax(-1)
            drawn = zip(every.exp().split(num), draws, strict=True)
            now = torch.cat([torch.multinomial(part, 1, generator=one) for part, one in drawn])
            of_token = every.gather(1, now)
            for row in range(len(ids)):
                if ids[row][-1:] != [ends]:
                    ids[row].append(int(now[row, 0]))
                    logps[row].append(float(of_token[row, 0]))
            if all(one[-1] == ends for one in ids):
                break
        made = [choice(prompts[row // num], *one) for row, one in enumerate(zip(ids, logps, strict=True))]
        return [made[first : first + num] for first in range(0, len(made), num)]


def choice(prompt: list[int], ids: list[int], logps: list[float]) -> dict[str, Any]:
    names = [f"token_id:{one}" for one in ids]
    top = [{name: logp} for name, logp in zip(names, logps, strict=True)]
    logprobs = {"tokens": names, "token_logprobs": logps, "top_logprobs": top}
    return {"prompt_token_ids": prompt, "token_ids": ids, "logprobs": logprobs}


class Log(TrainerCallback):
    """What was logged, in order."""

    def __init__(self) -> None:
        self.entries: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.entries.append(state.log_history[-1])


def learned(assets: str, ahead: int, seed: int, steps: int) -> dict[str, float]:
    """Train once, and return shares of right answers: held-out after the run, and of its first and last steps."""
    vllm_generation.is_vllm_available = lambda *names, **versions: True
    vllm_generation.VLLMClient = vllm_servers.VLLMClients = SamplingServers
    SamplingServers.folder, SamplingServers.seed = f"{assets}/model", seed
    log = Log()
    with tempfile.TemporaryDirectory() as folder:
        words = (
            f"--config quickstart --model_name_or_path {assets}/model --dataset_name {assets}/data --seed {seed} "
            f"--output_dir {folder} --bf16 false --per_device_train_batch_size 64 --max_steps {steps} "
            f"--eval_steps {steps} --eval_on_start false --generation_ahead {ahead} --use_vllm true "
            "--vllm_mode server --vllm_importance_sampling_mode token_truncate --vllm_importance_sampling_clip_max 2"
        )
        grpo(words.split(), [log])
    held_out = [entry[f"eval_{ANSWER}"] for entry in log.entries if f"eval_{ANSWER}" in entry]
    trained = [entry for entry in log.entries if ANSWER in entry]
    return {
        "held_out": held_out[-1],
        "first_steps": statistics.mean(entry[ANSWER] for entry in trained[:5]),
        "last_steps": statistics.mean(entry[ANSWER] for entry in trained[-5:]),
        "steps_behind": trained[-1].get("sampling/steps_behind", 0.0),
        "truncated_frac": statistics.mean(entry.get("sampling/truncated_frac", 0.0) for entry in trained),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="seeds, from 42 on")
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps of a run, of 64 completions each")
    parser.add_argument("--output", type=Path, help="JSON file for the figures, with machine and versions")
    options = parser.parse_args()
    assets, runs = str(prepare()), []
    table = Table(title="Share of right answers: generation_ahead 0 and 1")
    for column in ("seed", "ahead", "held-out", "first 5 steps", "last 5 steps"):
        table.add_column(column, justify="right")
    for seed in range(42, 42 + options.seeds):
        for ahead in (0, 1):
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:  # a script sets up a process
                run = alone.submit(learned, assets, ahead, seed, options.steps).result()
            runs.append({"seed": seed, "ahead": ahead, **run})
            table.add_row(
                str(seed), str(ahead), *(f"{run[one]:.2f}" for one in ("held_out", "first_steps", "last_steps"))
            )
            print(runs[-1], flush=True)
    Console().print(table)
    save(options.output, "ahead_learning", steps=options.steps, runs=runs)


if __name__ == "__main__":
    main()
