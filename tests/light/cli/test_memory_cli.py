"""`trl-ext plan`: a question in, a table or JSON and an exit code out."""

import json
import os
import re
import socket
import subprocess
import sys

import pytest
import yaml

from trl_ext.cli.plan.command import NOTHING_FITS, plan
from trl_ext.errors import ConfigError
from trl_ext.memory.planner.folder import read_plan
from trl_ext.memory.planner.presets import PRESETS

pytestmark = pytest.mark.slow

PPO = "--trainer ppo --model meta-llama/Meta-Llama-3-8B --gpus 4xA40-48GB".split()
K1 = "--max_prompt_length 1024 --max_completion_length 1024".split()
HEAVY = ("torch", "trl", "transformers", "datasets", "numpy", "accelerate", "deepspeed")


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)


def test_planning_imports_nothing_heavy():
    code = (
        "import sys, trl_ext.memory, trl_ext.cli.plan.command as p; import contextlib, io\n"
        "with contextlib.redirect_stdout(io.StringIO()): p.plan('--trainer grpo --model 7B --gpus 1x4090'.split())\n"
        f"print([m for m in {HEAVY} if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


ODD_VALUES = {
    "--rows 0": "--rows is 0. Give at least one row.",
    "--rows -5": "--rows is -5. Give at least one row.",
    "--gpu_memory_gib nan": "--gpu_memory_gib nan",
    "--gpu_memory_gib inf": "--gpu_memory_gib inf",
    "--host_memory_gib 0": "--host_memory_gib 0.0",
    "--host_memory_gib -4": "--host_memory_gib -4.0",
    "--host_memory_gib nan": "--host_memory_gib nan",
    "--num_generations 0": "num_generations is 0. It must be a number of at least 1.",
    "--steps_per_generation -1": "steps_per_generation is -1. It must be a number of at least 0.",
    "--max_tokens_per_forward -1": "max_tokens_per_forward is -1. It must be a number of at least 0.",
    "--beta nan": "beta is nan. It must be a number of at least 0.",
    "--beta inf": "beta is inf. It must be a number of at least 0.",
    "--beta -1": "beta is -1.0. It must be a number of at least 0.",
    "--method lora --lora_dropout -1": "lora_dropout is -1.0. It must be a number of at least 0.",
    "--reward_model 7B": "reward_model is '7B'. Use one of none, copy, adapter.",
    "--zero_stage 3 --stage3_max_live_parameters -1": "stage3_max_live_parameters is -1.",
    "--global_batch 99999999999": "global_batch is 99999999999. It must be at most 1000000.",
    "--per_device_train_batch_size 99999999999": "global_batch is ",
    "--num_generations 99999999999": "global_batch is ",
}


@pytest.mark.parametrize("words", ODD_VALUES)
def test_a_value_that_no_plan_can_have_is_a_sentence(words):
    with pytest.raises(ConfigError) as refused:
        plan(["--trainer", "grpo", "--model", "7B", "--gpus", "2xA100-40GB", *words.split()])
    assert ODD_VALUES[words] in str(refused.value)


def test_the_table_tells_plans_terms_refusals_and_the_launch_line(capsys):
    assert plan([*PPO, *K1, "--allow", "lora"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for words in ("LoRA r=16", "policy weights", "CUDA context", "slack", "optimizer step", "refused", "trl-ext ppo"):
        assert words in text
    assert "(44.4 GiB each, less 1.2 of CUDA context: 43.2 GiB usable, of which 5% stay free; PCIe 4)" in text
    assert "ZeRO-2, all weights: 120 GiB at the optimizer step on a card with 43 GiB usable" in text
    assert "estimated" in text


def test_seconds_of_the_longest_completions_are_called_so_and_a_mean_makes_them_less(capsys):
    question = "--trainer grpo --model 8B --gpus 8xH100-80GB --max_completion_length 4096 --use_vllm"
    assert plan(question.split()) == 0
    words = "Seconds are for completions that are all 4,096 tokens long: give --mean_completion_length."
    assert words in " ".join(capsys.readouterr().out.split())
    assert plan([*question.split(), "--json"]) == 0
    longest = json.loads(capsys.readouterr().out)["plans"][0]["step_parts_s"]
    assert plan([*question.split(), "--mean_completion_length", "400", "--json"]) == 0
    mean = json.loads(capsys.readouterr().out)["plans"][0]["step_parts_s"]
    assert mean["update"] < longest["update"] / 4 and mean["generation"] < longest["generation"]
    assert plan([*question.split(), "--mean_completion_length", "400"]) == 0
    assert "Seconds are those" not in capsys.readouterr().out
    with pytest.raises(ConfigError, match="mean_completion_length=5000, max_completion_length=4096"):
        plan([*question.split(), "--mean_completion_length", "5000"])


def test_the_parts_of_a_step_add_up(capsys):
    for question in ("--model 8B --gpus 8xH100-80GB --use_vllm", "--model 1.5B --gpus 1x4090 --allow lora"):
        said = printed(capsys, f"--trainer grpo --max_completion_length 4096 {question}")
        parts = re.search(r"Step of about [\d,]+ s, rough: (.+?)\.", said)[1]
        assert "generation" in parts and 97 <= sum(map(int, re.findall(r"(\d+)%", parts))) <= 103


def printed(capsys, question) -> str:
    plan(question.split())
    return " ".join(capsys.readouterr().out.split())


def test_a_card_without_bf16_is_refused_with_fp16_as_the_way_out(capsys, tmp_path):
    question = "--trainer grpo --model Qwen/Qwen2.5-0.5B --gpus 2xT4 --method lora"
    with pytest.raises(ConfigError, match=r"T4-16GB, compute capability 7\.5, has no bf16\. Train in fp16: --fp16"):
        plan(question.split())
    assert plan([*question.split(), "--fp16", "--write", str(tmp_path)]) == 0
    recipe = yaml.safe_load((tmp_path / "recipe.yaml").read_text())
    assert (recipe["bf16"], recipe["fp16"], recipe["dtype"]) == (False, True, "float16")
    assert read_plan(tmp_path).job.fp16
    capsys.readouterr()
    # As much as in bf16, where a card has it.
    elsewhere = f"{question.replace('2xT4', '2xA10')} --json"
    peaks = [json.loads(printed(capsys, elsewhere + fp16)) for fp16 in ("", " --fp16")]
    assert peaks[0]["plans"][0]["peak_gib"] == peaks[1]["plans"][0]["peak_gib"]
    with pytest.raises(ConfigError, match="TRL keeps adapters on a 4-bit base in bf16"):
        plan(f"{question} --fp16 --method qlora".split())
    # Nobody is sent to a larger card without bf16.
    assert "V100" not in printed(capsys, "--trainer grpo --model 14B --gpus 1x4070 --method qlora --offload none")


def test_what_is_assumed_of_an_unknown_card_is_said(capsys):
    question = "--trainer reward --model 1B --gpus 1x{} --gpu_memory_gib 23"
    words = "foo is not in the table of cards. Assumed: 600 GB/s, 100 TFLOPS, PCIe 4 without peer access, compute "
    assert words + "capability 8.0, which has bf16." in printed(capsys, question.format("foo"))
    (first, *_) = json.loads(printed(capsys, question.format("foo") + " --json"))["plans"]
    assert "Assumed: 600 GB/s" in first["assumed"]
    assert "Assumed" not in printed(capsys, question.format("4090"))


def test_eager_attention_is_named_with_what_it_takes(capsys):
    question = "--trainer grpo --gpus 8xH200 --model"
    assert "Rows are padded: this model's attention is eager" in printed(capsys, f"{question} google/gemma-2-9b")
    assert "eager" not in printed(capsys, f"{question} 8B")


def test_adapters_are_a_line_of_every_answer_that_trains_all_weights(capsys):
    question = "--trainer grpo --model Qwen/Qwen3-8B --gpus 1x4090"
    told = printed(capsys, question)
    assert re.search(
        r"--allow lora: [\d.]+ GiB, about \d+ s a step.*, rough, 15.3 GiB of host memory instead of", told
    )
    assert "--allow lora: " not in printed(capsys, f"{question} --allow lora")
    assert "--allow lora: " not in printed(capsys, f"{question} --method lora")
    assert "--allow lora: " not in printed(capsys, f"{question} --method full")


def test_hours_are_those_of_the_rows_once(capsys):
    """By hand: 62,000 pairs in batches of 48 are 1,292 steps; a prompt takes a group of a step's completions."""
    question = "--trainer reward --model 8B --gpus 6x4090 --method lora --global_batch 48 --max_length 4096"
    assert "62,000 rows once: 1,292 steps, about " in printed(capsys, f"{question} --rows 62000")
    answer = json.loads(printed(capsys, f"{question} --rows 62000 --json"))
    assert answer["hours"] == pytest.approx(1292 * answer["plans"][0]["step_s"] / 3600, rel=1e-2)
    question = "--trainer grpo --model 1.5B --gpus 1xA100-80GB --global_batch 64 --num_generations 8 --rows 7473"
    assert "7,473 rows once: 935 steps, about " in printed(capsys, question)


def test_an_answer_gives_seconds_of_the_engines_that_fit(capsys):
    """By hand: a token of 32 layers launches for 26 ms, compiled for 6, and reads 16 GB of weights in 13 ms.

    64 rows read 1,024 tokens of 131 kB on average, 8.6 GB, in 7 ms: 33 and 20 ms for each of 1,024 tokens.
    """
    question = "--trainer grpo --model meta-llama/Llama-3.1-8B --gpus 1xA100-80GB --method lora --zero_stage 0"
    question += " --max_prompt_length 512 --max_completion_length 1024 --mean_completion_length 1024"
    text = printed(capsys, question)
    found = re.search(r"Generation, rough: (\d+) s by plain generate, (\d+) s with cache_implementation: static", text)
    assert (int(found[1]), int(found[2])) == (40, 20)
    assert "at best by continuous batching; --use_vllm plans vLLM" in text
    sharded = "--trainer grpo --model 7B --gpus 4xA100-80GB --zero_stage 3"
    assert "static" not in printed(capsys, sharded) and "s by plain generate" in printed(capsys, sharded)
    assert "Generation, rough" not in printed(capsys, f"{question} --use_vllm")


def test_an_answer_says_what_full_logits_would_need_and_a_near_miss_is_worth_a_try(capsys):
    """By hand: 14 bytes for 8 x 1,024 scored tokens and 128,256 words are 13.7 GiB, less a tile of the fused head."""
    question = "--trainer grpo --model meta-llama/Llama-3.1-8B --gpus 1xA100-80GB --method lora --zero_stage 0"
    question += " --max_prompt_length 512 --max_completion_length 1024 --per_device_train_batch_size 8"
    need = re.search(r"Full logits, .* would need ([\d.]+) GiB more", printed(capsys, question))
    assert 12.5 < float(need[1]) < 13.7
    question = "--trainer reward --model 8B --gpus 1xA100-80GB --method lora --zero_stage 0 --checkpoint_every 1"
    question += " --per_device_train_batch_size 1 --no-activation_offloading --dtype bfloat16"
    usable = json.loads(printed(capsys, f"{question} --json"))["plans"][0]["reserved_gib"]
    for room, is_near in ((0.97, True), (0.95, False)):
        told = printed(capsys, f"{question} --gpu_memory_gib {usable * room + 1.2}")
        assert "Nothing that keeps the optimisation fits." in told
        assert ("; within 4% of the card: try it" in told) is is_near


def test_json_has_the_documented_keys_what_if_and_max(capsys):
    assert plan([*PPO, *K1, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert {"fits", "peak_gib", "phases", "terms", "settings", "launch"} <= answer["plans"][0].keys()
    assert {"peak_gib", "settings", "reason"} <= answer["refused"][0].keys()
    assert answer["plans"][0]["phases"].keys() == {"generate", "score", "update", "step"}
    assert answer["plans"][0]["basis"] == "estimated"
    assert (
        plan([*PPO, *K1, "--allow", "lora", "--what-if", "zero_stage=2", "--max", "max_prompt_length", "--json"]) == 0
    )
    answer = json.loads(capsys.readouterr().out)
    assert answer["what_if"]["changes"] == {"zero_stage": "2"} and answer["what_if"]["peak_gib"] > 0
    largest = answer["largest"]
    assert largest["max_prompt_length"] >= 1024
    assert largest["label"].startswith("ZeRO-") and largest["step_s"] > 0


def test_the_largest_value_is_told_with_label_and_seconds_of_its_plan(capsys):
    question = "--trainer reward --model Qwen/Qwen2.5-7B-Instruct --gpus 6x4090 --allow lora --max max_length"
    assert plan(question.split()) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    words = (
        r"largest max_length that fits: ([\d,]+), as ZeRO-3 \+ all states in host memory, .*, about ([\d,]+) s a step"
    )
    length, step_s = (int(number.replace(",", "")) for number in re.fullmatch(words, last).groups())
    assert length > 8192 and step_s > 0


def test_what_does_not_fit_exits_1_with_the_word_that_would_help_if_there_is_one(capsys):
    assert plan("--trainer grpo --model 7B --gpus 1x4090 --zero_stage 0".split()) == NOTHING_FITS
    assert "--allow lora: " in capsys.readouterr().out
    assert plan("--trainer grpo --model 70B --gpus 1x4090 --method qlora".split()) == NOTHING_FITS
    assert "--gpus 1xA6000-48GB: " in capsys.readouterr().out
    whole = "--trainer ppo --model 70B --gpus 1xMI300X --method qlora --critic separate --zero_stage 0"
    assert plan(whole.split()) == NOTHING_FITS
    dead_end = "No number of cards helps, and no card of the table is large enough."
    assert f"QLoRA holds the whole 4-bit base on each card. {dead_end}" in capsys.readouterr().out
    # 8-bit Adam, which would be looked at, does not go with the offload that was asked for: nobody gave it.
    question = "--trainer reward --model 14B --gpus 4x4090 --zero_stage 3 --offload all --max_length 32768"
    assert plan(question.split()) == NOTHING_FITS
    out = capsys.readouterr().out
    assert "22.5 with slack, on a card with 22.4 GiB" in out and "bnb" not in out


def test_a_first_plan_at_its_limit_is_marked(capsys):
    question = "--trainer reward --model 8B --gpus 1xA100-80GB --method lora --zero_stage 0 --checkpoint_every 1"
    question += " --per_device_train_batch_size 1 --no-activation_offloading --dtype bfloat16"
    assert plan([*question.split(), "--json"]) == 0
    need_gib = json.loads(capsys.readouterr().out)["plans"][0]["reserved_gib"]
    for room, is_marked in ((1.5, False), (1.005, True)):
        card_gib = need_gib * room / 0.95 + 1.2  # beside the head-room and CUDA's context
        assert plan([*question.split(), "--gpu_memory_gib", str(card_gib)]) == 0
        assert ("Tight: within 1% of the room that a plan may fill." in capsys.readouterr().out) is is_marked


def test_adapters_follow_a_plan_at_its_limit_and_host_memory_is_compared_or_said_not_to_be(capsys):
    for memory, is_unknown in (((), True), (("--host_memory_gib", "512"), False)):
        assert plan([*"--trainer ppo --model 8B --gpus 6x4090".split(), *memory]) == 0
        before, after = capsys.readouterr().out.split("\nrefused\n")
        assert "Tight: within" in before and "Roomier: --allow lora: " in before and "--allow lora" not in after
        assert ("Host GiB are not compared with the machine's memory: give --host_memory_gib." in before) is is_unknown
    assert plan("--trainer ppo --model 8B --gpus 6x4090 --host_memory_gib 200".split()) == 1


def test_a_name_that_nobody_knows_is_one_sentence_at_once_where_the_hub_is_away(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        hub = f"http://127.0.0.1:{taken.getsockname()[1]}"
        env = {**os.environ, "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub, "HF_HOME": str(tmp_path)}
        words = "plan --trainer grpo --model Qwen/Qwen3.5-14B --gpus 8xH100-80GB".split()
        command = [sys.executable, "-m", "trl_ext.cli.main", *words]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=20)  # it took 24 seconds
    assert done.returncode == 2 and done.stdout == ""
    (sentence,) = done.stderr.split("\n\n")[0].strip().splitlines()
    assert f"the hub: {hub} does not answer (" in sentence
    assert "Nearest: Qwen/Qwen3.5-4B, Qwen/Qwen3.5-9B" in sentence and "Qwen2.5" not in sentence


def test_written_files_are_named(tmp_path, capsys):
    folder = tmp_path / "plan"
    assert plan([*PPO, *K1, "--allow", "lora", "--write", str(folder)]) == 0
    names = {file.name for file in folder.iterdir()}
    assert {"accelerate.yaml", "recipe.yaml", "plan.json"} <= names
    assert "written: " in capsys.readouterr().out


def test_presets_are_listed_and_each_is_a_question_that_other_settings_change(capsys, tmp_path):
    assert plan(["--presets"]) == 0
    text = capsys.readouterr().out
    assert all(f"{name} " in text and one.purpose in text for name, one in PRESETS.items())
    assert plan(["--presets", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["reward-8b-6x4090-4096"]["gpus"] == "6x4090"
    name, folder = "reward-8b-6x4090-4096", str(tmp_path / "plan")
    assert plan(["--preset", name, "--write", folder]) == 0
    assert read_plan(folder).job == PRESETS[name].plan().job
    assert plan(["--preset", name, "--lora_r", "8", "--write", folder]) == 0
    assert read_plan(folder).job.lora_r == 8


def test_a_slip_is_a_sentence(subtests):
    for words, message in (
        (["--preset", "24gb"], "There is no preset '24gb'. Nearest: "),
        (["--trainer", "grpo"], "Give also, for example, --model 8B --gpus 4xA100-80GB"),
        ([*PPO, *K1, "--what-if", "max_length"], "KEY=VALUE"),
        ([*PPO, *K1, "--max", "dtype"], "cannot be searched for"),
        ([*PPO, *K1, "--what-if", "max_lenth=3"], "Nearest: max_length"),
        ([*PPO, *K1, "--allow", "lora", "--what-if", "packing=on"], "packing is 'on'. Write true or false"),
    ):
        with subtests.test(words), pytest.raises(ConfigError, match=message):
            plan(words)


@pytest.mark.parametrize("model", ["8B", "config.json"])
def test_a_model_without_weights_is_asked_for_and_never_lands_in_a_recipe(model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    config = {"model_type": "llama", "num_hidden_layers": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    question = ["--trainer", "ppo", "--model", model, "--gpus", "2xH200", "--zero_stage", "3", "--write", "plan"]
    assert plan(question) == 0
    text = (tmp_path / "plan" / "recipe.yaml").read_text()
    assert "model_name_or_path:" not in text and "value_model" not in text and "# model_name_or_path is yours" in text
    for where in (capsys.readouterr().out, (tmp_path / "plan" / "accelerate.yaml").read_text()):
        assert "--model_name_or_path MODEL --value_model MODEL" in where


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["--model", "8B", "--gpus", "1x4090"], "Give also, for example, --trainer grpo; or a preset: "),
        (["--trainer", "grpo"], "Give also, for example, --model 8B --gpus 4xA100-80GB; or a preset"),
    ],
)
def test_what_a_plan_lacks_is_named_with_an_example_that_works(words, sentence, capsys):
    with pytest.raises(ConfigError) as caught:
        plan(words)
    assert str(caught.value).startswith(sentence)
    example = str(caught.value).partition("for example, ")[2].partition("; or")[0]
    assert plan([*words, *example.split(), "--allow", "lora"]) == 0
