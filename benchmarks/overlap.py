"""What does `generation_ahead: 1` save of a whole step? Against 0, with real updates and servers that sleep.

Servers stand in for vLLM's: they take a fixed time for each generation, and answer made completions. The time is given
as a multiple of the update's, which is measured first. A judge of half a second scores each completion, and is hidden
where generation has time to spare. Rounds alternate between both settings; the first two steps of each warm up.

    python benchmarks/overlap.py --output benchmarks/results/overlap_cpu.json

`--judged` answers another question: what does it save that the judge begins as completions come? Then the update
sleeps, too, and the ratio is that of a step whose judge begins when all of them are there.

    python benchmarks/overlap.py --judged --hidden 16 --output benchmarks/results/overlap_judged_cpu.json
"""

import argparse
import asyncio
import os
import random
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from datasets import Dataset
from machine import save
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl.generation import vllm_generation

from trl_ext import GRPOConfig, GRPOTrainer
from trl_ext.rewards import RuleSet, Verdict
from trl_ext.rewards.rules.async_rule import AsyncRule
from trl_ext.trainers.generation import ahead, vllm_servers

VOCAB, PROMPTS, COMPLETIONS, LENGTH, JUDGE_S = 512, 8, 8, 64, 0.5
UPDATE_S, GENERATION_S = 4.5, 3.0  # where both sleep: with the judge, a step of 5 s


class SleepingServers(vllm_servers.VLLMClients):
    """The client, with servers inside that take `seconds` for a generation and push weights in no time."""

    seconds = 0.0

    def __init__(self, base_url: str, **kwargs: Any):
        self.base_urls, self.base_url, self.model = [base_url], base_url, "made"
        self._of_thread = threading.local()

    def init_communicator(self, device: Any = 0) -> None:
        pass

    def close_communicator(self) -> None:
        pass

    def reset_prefix_cache(self) -> None:
        pass

    def get_server_info(self) -> dict[str, Any]:
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def is_up(self) -> bool:
        return True

    def update_named_params(self, metadata: Any, named_params: Any) -> None:
        for _ in named_params:
            pass

    def _post(self, url: str, **kwargs: Any) -> dict[str, Any]:
        asked = kwargs["json"]
        time.sleep(self.seconds)
        return {"choices": [made(ids, place) for ids in asked["prompt"] for place in range(asked["n"])]}


def made(prompt: list[int], place: int) -> dict[str, Any]:
    draw = random.Random(f"{prompt}/{place}")
    ids = [draw.randrange(3, VOCAB) for _ in range(LENGTH)]
    names, logps = [f"token_id:{one}" for one in ids], [-6.2] * LENGTH
    top = [{name: logp} for name, logp in zip(names, logps, strict=True)]
    logprobs = {"tokens": names, "token_logprobs": logps, "top_logprobs": top}
    return {"prompt_token_ids": prompt, "token_ids": ids, "logprobs": logprobs}


@dataclass(frozen=True, kw_only=True)
class SlowJudge(AsyncRule):
    """Waits for half a second, and pays by the length of the text."""

    concurrency: int = PROMPTS * COMPLETIONS

    async def score(self, row: Any) -> Verdict:
        await asyncio.sleep(JUDGE_S)
        return Verdict(len(row.text) % 17 / 17)


class Watch(TrainerCallback):
    """The seconds at which optimizer steps end.

    Args:
        sleep_s: What each of them waits besides.
    """

    def __init__(self, sleep_s: float) -> None:
        self.ends_s: list[float] = []
        self._sleep_s = sleep_s

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(self._sleep_s)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.ends_s.append(time.perf_counter())


def seconds_of_step(ahead: int, judges: bool, options: argparse.Namespace) -> tuple[float, dict[str, float]]:
    """Seconds of an optimizer step, and of its phases."""
    words = {f"w{number}": number for number in range(VOCAB)}
    tokens = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="w0", bos_token="w1", eos_token="w2")
    config = AutoConfig.for_model(
        "llama",
        vocab_size=VOCAB,
        hidden_size=options.hidden,
        intermediate_size=2 * options.hidden,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        pad_token_id=0,
        eos_token_id=2,
    )
    draw = random.Random(0)
    prompts = [" ".join(f"w{draw.randrange(3, VOCAB)}" for _ in range(32)) for _ in range(PROMPTS * 32)]
    rewards = (
        RuleSet([SlowJudge(name="judge")]) if judges else lambda completions, **_: [len(c) % 7 for c in completions]
    )
    watch = Watch(UPDATE_S if options.judged else 0.0)
    with tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(
            folder,
            generation_ahead=ahead,
            vllm_importance_sampling_mode="token_truncate",
            vllm_importance_sampling_clip_max=2.0,
            use_vllm=True,
            vllm_mode="server",
            per_device_train_batch_size=PROMPTS * COMPLETIONS,
            num_generations=COMPLETIONS,
            max_completion_length=LENGTH,
            max_steps=options.steps + 2,
            use_cpu=True,
            bf16=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        policy = AutoModelForCausalLM.from_config(config)
        data = Dataset.from_dict({"prompt": prompts})
        trainer = GRPOTrainer(policy, rewards, args, data, processing_class=tokenizer, callbacks=[watch])
        trainer.train()
    log = [entry for entry in trainer.state.log_history if "phase/update_s" in entry][2:]
    phases = {
        name: sum(entry.get(name, 0.0) for entry in log) / len(log) for name in log[0] if name.startswith("phase/")
    }
    return (watch.ends_s[-1] - watch.ends_s[1]) / options.steps, phases


@dataclass
class Result:
    """One case: mean seconds of a step, with what the servers were given.

    Args:
        generation_over_update: Asked for.
        limit: Of the ratio: (generation + rest) over the larger of both.
    """

    case: str
    generation_over_update: float
    generation_s: float
    waits_s: float
    ahead_s: float
    ratio: float
    limit: float


def measured(case: str, factor: float, judges: bool, update_s: float, options: argparse.Namespace) -> Result:
    SleepingServers.seconds = factor * update_s
    waits, ahead = [], []
    for _ in range(options.rounds):
        waits.append(seconds_of_step(0, judges, options)[0])
        ahead.append(seconds_of_step(1, judges, options)[0])
    waits_s, ahead_s = sum(waits) / len(waits), sum(ahead) / len(ahead)
    generation_s = SleepingServers.seconds
    limit = waits_s / max(generation_s, waits_s - generation_s)
    return Result(case, factor, generation_s, waits_s, ahead_s, waits_s / ahead_s, limit)


def early(options: argparse.Namespace) -> list[dict[str, float]]:
    """Seconds of a step in which rules are waited for, begun late and as completions come; what is saved of 5 s."""
    plain, waits = ahead.scoring_early, []
    SleepingServers.seconds = GENERATION_S
    for begins in (lambda *given: None, plain):
        ahead.scoring_early = begins
        waits.append(seconds_of_step(1, True, options)[1]["phase/score_s"])
    saved = (waits[0] - waits[1]) / (UPDATE_S + JUDGE_S)
    print(f"The judge is waited for {waits[0]:.2f} and {waits[1]:.2f} s: {saved:.1%} of a step saved.")
    return [{"generation_s": GENERATION_S, "late_s": waits[0], "early_s": waits[1], "saved_frac": saved}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps measured per setting and round")
    parser.add_argument("--rounds", type=int, default=2, help="times to alternate between both settings")
    parser.add_argument("--hidden", type=int, default=256, help="size of the model, to see that everything runs")
    parser.add_argument("--judged", action="store_true", help="what scoring as completions come saves, by sleep alone")
    parser.add_argument("--output", type=Path, help="JSON file for the figures, with machine and versions")
    options = parser.parse_args()
    vllm_generation.is_vllm_available = lambda *names, **versions: True
    vllm_generation.VLLMClient = vllm_servers.VLLMClients = SleepingServers
    if options.judged:
        save(
            options.output, "overlap", steps=options.steps, judge_s=JUDGE_S, update_s=UPDATE_S, results=early(options)
        )
        return
    update_s, _ = seconds_of_step(0, False, options)
    cases = [("equal", 1.0, False), ("half", 0.5, False), ("twice", 2.0, False), ("equal, judged", 1.0, True)]
    results = [measured(*case, update_s, options) for case in cases]
    table = Table(title="A whole step, seconds: generation_ahead 0 and 1")
    for column in ("generation / update", "generates", "waits", "ahead", "ratio", "limit"):
        table.add_column(column, justify="right")
    for r in results:
        values = (r.generation_s, r.waits_s, r.ahead_s, r.ratio, r.limit)
        table.add_row(r.case, *(f"{value:.2f}" for value in values))
    Console().print(table)
    figures = {"steps": options.steps, "rounds": options.rounds, "update_s": update_s}
    save(options.output, "overlap", **figures, results=[asdict(r) for r in results])


if __name__ == "__main__":
    main()
