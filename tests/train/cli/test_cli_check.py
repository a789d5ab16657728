"""`trl-ext check`: a recipe is parsed, its tokenizer, rows and rules are tried, its memory planned; no weights."""

import json
import logging
import os
import re
import socket
import subprocess
import sys
import warnings
from importlib import import_module
from shutil import copytree

import pytest
from transformers import AutoConfig

from tests import recipes, tiny
from tests.conftest import ROOT
from tests.recipes import RULES
from trl_ext.cli.check import memory as check_memory
from trl_ext.cli.check import models as check_models
from trl_ext.cli.check import recipe as check_recipe
from trl_ext.cli.check.command import CANNOT_WORK, check, print_findings
from trl_ext.cli.check.data import Lengths
from trl_ext.doctor import Facts, Gpu, probe
from trl_ext.doctor.finding import problem
from trl_ext.doctor.look import read_answer
from trl_ext.errors import ConfigError
from trl_ext.launch import accelerate as launch
from trl_ext.memory.cards import Hardware, find_card, parse_gpus
from trl_ext.memory.files.launch import SHIPPED, engine_fields
from trl_ext.memory.models.find import MODELS, find_shape
from trl_ext.rewards.isolation.sandbox import api
from trl_ext.scripts.training import load_rows

GRPO = dict(rules=RULES, per_device_train_batch_size=4, gradient_accumulation_steps=2, max_completion_length=6)
GRPO |= dict(num_generations=8, num_generations_eval=1, eval_strategy="steps", eval_steps=2)
GRPO |= dict(bf16=True, report_to="none")
LORA = dict(use_peft=True, lora_r=16, lora_target_modules=["all-linear"], dtype="bfloat16")
PPO = {**{key: GRPO[key] for key in ("rules", "bf16", "report_to")}, "response_length": 6, "kl_coef": 0.05}
REWARD = dict(max_length=16, per_device_train_batch_size=2, bf16=True, report_to="none", eval_strategy="no")


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    """A tokenizer beside the config of an 8B model, a tiny one, and data; no weights anywhere."""
    folder = tmp_path_factory.mktemp("assets")
    name = next(name for name in MODELS if "lama-3-8" in name)
    for kind, config in (("8B", MODELS[name][1]), ("tiny", tiny.model("llama").config.to_dict())):
        tiny.tokenizer().save_pretrained(folder / kind)
        (folder / kind / "config.json").write_text(json.dumps(config))
    answers = [(tiny.words(i), tiny.words(i + 1, i)) for i in range(3, 19)]
    recipes.write_rows(folder / "data", recipes.PROMPTS)
    pairs = [{"prompt": one, "chosen": other, "rejected": one} for one, other in answers]
    recipes.write_rows(folder / "pairs", pairs)
    return folder


def write(folder, assets, model="8B", data="data", **keys):
    """Write a recipe for this model and these rows; return its path."""
    own = {"model_name_or_path": str(assets / model), "dataset_name": str(assets / data)}
    return recipes.recipe(folder, **own | keys)[1]


@pytest.fixture
def ask(assets, tmp_path, monkeypatch, capsys):
    """Write a recipe, check it, and give the exit code and the findings."""
    monkeypatch.setattr(check_memory, "machine", lambda gpus, *_: machine(gpus))
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)

    def run(keys, *words, model="8B", data="data"):
        path = write(tmp_path, assets, model, data, output_dir=str(tmp_path / "out"), **keys)
        capsys.readouterr()
        code = check([path, "--json", *words])
        answer = json.loads(capsys.readouterr().out)
        assert answer["ok"] == (code == 0)
        return code, answer["findings"]

    return run


def machine(gpus):
    """Only named cards, with 128 GiB of host memory: those of the machine that runs the tests do not count."""
    if gpus is None:
        return None
    count, _, name = gpus.partition("x")
    return Hardware(int(count), find_card(name), 128.0)


def told(findings, subject, level=None):
    chosen = [f for f in findings if f["subject"] == subject and level in (None, f["level"])]
    return " ".join(f"{f['what']} {f['advice']}" for f in chosen)


def test_a_recipe_that_works_is_told_step_by_step(ask):
    code, findings = ask({**GRPO, **LORA}, "--gpus", "4xA40-48GB", "--config_file", "zero2")
    assert code == 0
    assert {f["level"] for f in findings} == {"ok", "note"}
    assert "grpo run (found from its keys; --trainer overrides it), for 4 processes" in told(findings, "recipe")
    assert "199 tokens, without a chat template" in told(findings, "tokenizer")
    assert "16 rows and 16 held-out ones read" in told(findings, "data")
    assert "has 2 tokens; with its completion 8 at most" in told(findings, "lengths")
    assert "8 of 8 gold answers earn everything; of 24 answers of other rows 0 do." in told(findings, "rules")
    assert "Gold completions earn 1.1 on 8 of 8 rows" in told(findings, "rules")
    assert "ZeRO-2, LoRA r=16, micro-batch 4 x 2" in told(findings, "memory", "ok")


GSM8K = [{"question": tiny.words(i, i + 1), "answer": f"{tiny.words(i)}\n#### {i},000"} for i in range(3, 19)]
MAPPED = dict(
    columns={"prompt": "question"},
    answer_pattern="#### (.+)",
    prompt_template="{question}\nw9",
    rules=[{"rule": "answer", "gold": "answer", "kind": "number"}],
    eval_strategy="no",
)


def files_of(folder, rows):
    return str(recipes.write_rows(folder / "rows.jsonl", rows))


@pytest.fixture(scope="module")
def chat_model(assets, tmp_path_factory):
    """The tiny model's folder, its tokenizer with a chat template."""
    folder = tmp_path_factory.mktemp("chat_model")
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text((assets / "tiny" / "config.json").read_text())
    return folder


def test_the_rules_see_the_tag_that_the_chat_template_opens(ask, chat_model, tmp_path):
    rules = [RULES[0], {"rule": "tags", "tags": ["answer"], "weight": 0.1}]
    keys = {**GRPO, "rules": rules, "system_prompt": "w7"}
    assert "Gold completions earn 1.1 on" in told(ask(keys, model=chat_model)[1], "rules")
    template = (chat_model / "chat_template.jinja").read_text()
    copytree(chat_model, tmp_path / "opens")
    (tmp_path / "opens" / "chat_template.jinja").write_text(template + "<answer>\n")
    # The tag of the gold completions is the second one.
    assert "Gold completions earn 1 on" in told(ask(keys, model=tmp_path / "opens")[1], "rules")


def test_the_level_at_which_programs_will_run_is_told_with_what_refuses_the_next(ask, tmp_path, monkeypatch):
    rows = [{"prompt": "w3 w4", "tests": [{"input": "", "output": "1"}]}] * 16
    keys = {**GRPO, "rules": [{"rule": "code"}], "dataset_name": str(recipes.write_rows(tmp_path / "programs", rows))}
    for level, mark, words in ((2, "ok", "at L2, its highest"), (1, "note", "not at L2 (namespaces: kernel.x is 1)")):
        monkeypatch.setattr(api, "sandbox_level", lambda level=level, **_: (level, "namespaces: kernel.x is 1"))
        assert words in told(ask(keys)[1], "sandbox", mark)
    assert told(ask(GRPO)[1], "sandbox") == ""


def test_a_future_warning_is_shown_unless_it_is_a_librarys(ask, tmp_path, monkeypatch):
    warn = "import warnings\nwarnings.warn('use two', FutureWarning, stacklevel=1)\n"
    (tmp_path / "warning_rules.py").write_text(f"{warn}def one(row):\n    return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        ask({**GRPO, "rules": [{"rule": "call", "function": "warning_rules.one"}], "gradient_checkpointing": True})
    assert [str(one.message) for one in shown if one.category is FutureWarning] == ["use two"]


def test_eight_rows_are_shown_as_the_model_reads_them(ask, chat_model, tmp_path):
    keys = {**GRPO, **MAPPED, "system_prompt": "w7", "dataset_name": files_of(tmp_path, GSM8K)}
    code, findings = ask(keys, model=chat_model)
    assert code == 0, findings
    rows = [f["what"] for f in findings if f["subject"].startswith("row ")]
    assert len(rows) == 8
    assert rows[0] == r"<system>w7<user>w3 w4\nw9<assistant>  |  answer: 3,000"
    assert "8 of 8 gold answers earn everything" in told(findings, "rules")


def test_a_chat_template_that_is_not_used_is_told_unless_meant(ask, chat_model):
    words = "The prompts are text, and the model's chat template is not applied."
    for keys in ({}, {"prompt_format": "text"}):
        code, findings = ask({**GRPO, **keys}, model=chat_model)
        assert code == 0 and (words in told(findings, "data", "note")) == (not keys)


def test_the_run_warns_of_it_as_well(chat_model, tmp_path, caplog):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "w3"}\n' * 16)
    words = ["--dataset_name", str(tmp_path / "rows.jsonl"), "--model_name_or_path", str(chat_model)]
    words += ["--output_dir", str(tmp_path), "--use_cpu", "--bf16", "false"]
    for more, times in (([], 1), (["--prompt_format", "text"], 0), (["--prompt_format", "chat"], 0)):
        logging.Logger.warning_once.cache_clear()
        caplog.clear()
        script_args, training_args, model_args, dataset_args = check_recipe.make_parser("grpo").parse([*words, *more])
        load_rows(script_args, training_args, model_args, dataset_args)
        assert sum("the model's chat template is not applied. prompt_format:" in m for m in caplog.messages) == times


BLANK = {"columns": {"prompt": "question", "task": "answer"}, "rules": RULES[1:], "eval_strategy": "no"}
# What the last of the rows holds, keys, and what the check says of it.
LATE = [
    ({"question": None}, MAPPED, "train_dataset: row 16 has no 'question' (null)."),
    ({"answer": "w3"}, MAPPED, "train_dataset: row 16 has no match of answer_pattern '#### (.+)' in 'answer'."),
    ({"answer": None}, MAPPED, "row 16 has no 'answer' (null)"),
    (
        {"question": " "},
        BLANK,
        "row 16 has a blank prompt. Drop or mend such rows: dataset.filter(...).",
    ),
]


def test_small_data_of_this_machine_are_looked_at_as_a_whole(subtests, ask, tmp_path):
    for cells, keys, words in LATE:
        data = files_of(tmp_path, [*GSM8K, GSM8K[0] | cells])
        with subtests.test(words):
            code, findings = ask({**GRPO, **keys, "dataset_name": data})
            assert code == CANNOT_WORK and words in told(findings, "data", "problem")


def test_golds_that_are_null_in_some_rows_are_a_note_and_those_that_no_rule_can_read_a_problem(ask, tmp_path):
    rows = [{"prompt": tiny.words(i), "answer": tiny.words(i) if i < 18 else None} for i in range(3, 19)]
    code, findings = ask({**GRPO, "dataset_name": files_of(tmp_path, rows), "eval_strategy": "no"})
    assert code == 0 and "null or NaN in 1 of its 16 rows (row 15)" in told(findings, "data", "note")
    rows = [{"prompt": tiny.words(i), "answer": "none"} for i in range(3, 11)]
    keys = {**GRPO, "dataset_name": files_of(tmp_path, rows), "eval_strategy": "no"}
    code, findings = ask(keys | {"rules": [{"rule": "answer", "gold": "answer", "kind": "number"}]})
    assert code == CANNOT_WORK
    for words in ("0 of 8 gold answers earn everything", "its gold cannot be read"):
        assert words in told(findings, "rules", "problem")


def test_every_finding_is_a_line_of_the_table(assets, tmp_path, capsys):
    assert check([write(tmp_path, assets, "tiny", use_cpu=True, **GRPO), "--num_processes", "2"]) == 0
    text = capsys.readouterr().out
    for subject in ("recipe", "tokenizer", "data", "lengths", "rules", "memory"):
        assert f" {subject} " in text


def test_a_tokenizer_that_cannot_be_loaded_is_the_only_problem(ask):
    keys = {**GRPO, "system_prompt": "w7"}
    code, findings = ask({**keys, "model_name_or_path": "Qwen/Qwen2.5-1.5B-Instrct"})
    problems = [f["what"] for f in findings if f["level"] == "problem"]
    assert code == CANNOT_WORK and len(problems) == 1
    words = "The tokenizer of Qwen/Qwen2.5-1.5B-Instrct cannot be loaded, and there is no folder of this name"
    for part in (words, "hf download", "HF_ENDPOINT=URL", "Did you mean Qwen/Qwen2.5-1.5B-Instruct?"):
        assert part in problems[0]


def test_a_typo_is_the_only_finding_and_names_its_line_and_no_sentence_is_said_twice(ask):
    _, findings = ask({**GRPO, "model_name_or_path": "./nowhere"})
    assert sum("There is no folder" in f["what"] for f in findings) == 1
    code, findings = ask({**GRPO, "max_completion_lenght": 6})
    assert code == CANNOT_WORK and len(findings) == 1
    assert "Did you mean 'max_completion_length'?" in told(findings, "recipe", "problem")
    assert ", line " in told(findings, "recipe")


def test_keys_and_flags_tell_the_trainer(tmp_path):
    for keys, flags, trainer in (
        (GRPO, [], "grpo"),
        (PPO, [], "ppo"),
        (REWARD, [], "reward"),
        ({**GRPO, "critic": "head"}, [], "ppo"),
        ({"bf16": True}, ["--filter_pairs", "true"], "reward"),
    ):
        assert check_recipe.guess_trainer(recipes.recipe(tmp_path, **keys)[1], flags) == trainer


A40S, PAIRS = ["--gpus", "4xA40-48GB"], {"data": "pairs"}
AS_PPO = ["--trainer", "ppo", *A40S]
LARGE = {**GRPO, "gradient_accumulation_steps": 64}
ZERO3 = {**GRPO, **LORA, "config_file": "zero3"}
TOO_LONG = {**REWARD, "max_length": 1}
# A recipe, its flags, the kind of its data, the exit code; and of a subject and a level, what is said.
SAID = [
    ({**GRPO, "model_name_or_path": "./nowhere"}, [], {}, 1, "rewards", "problem", "There is no folder ./nowhere"),
    ({**GRPO, "dataset_name": "./nowhere"}, [], {}, 1, "data", "problem", "There is no file or folder nowhere"),
    ({**GRPO, "rules": None}, [], {}, 1, "rewards", "problem", "nothing to score completions with"),
    ({**GRPO, "rules": [{"rule": "answer", "gold": "solution"}]}, [], {}, 1, "data", "problem", "solution"),
    ({**GRPO, "max_tokens_per_forward": 7}, [], {}, 1, "lengths", "problem", "the longest row: a prompt of 2"),
    ({**GRPO, "deepspeed": "nowhere.json"}, [], {}, 1, "deepspeed", "problem", "There is no file nowhere.json"),
    ({**GRPO, "layer_kernels": False}, [], {}, 0, "layer kernels", "ok", "layer_kernels is false"),
    ({**GRPO, "bf16": True, "fp16": True}, [], {}, 1, "recipe", "problem", "At most one of fp16 and bf16"),
    ({**GRPO, "vllm_mode": "server"}, [], {}, 1, "settings", "problem", "no effect without use_vllm=True"),
    ({**LARGE, "eval_strategy": "no"}, [], {}, 1, "data", "problem", "has 16 rows; over 1 process one"),
    ({**GRPO, "dataset_streaming": True}, [], {}, 1, "data", "problem", "set max_steps"),
    # Two processes of four make a group of eight.
    ({**GRPO, "gradient_accumulation_steps": 1}, [], {}, 1, "recipe", "problem", "num_generations"),
    (GRPO, ["--max_step", "5"], {}, 1, "recipe", "problem", "Did you mean --max_steps?"),
    ({**GRPO, "dataset_streaming": True, "max_steps": 4}, [], {}, 0, "data", None, "8 rows and 8 held-out ones read"),
    ({**GRPO, "gradient_accumulation_steps": 1}, ["--num_processes", "2"], {}, 0, "recipe", "ok", "2 processes"),
    ({**GRPO, "rules": [RULES[1]]}, [], {}, 0, "rules", "ok", "Empty completions earn"),
    ({**PPO, "critic": "adapter"}, ["--trainer", "ppo"], {}, 1, "rewards", "problem", "the actor has none"),
    (TOO_LONG, [], PAIRS, 1, "lengths", "problem", "8 of 8 pairs are dropped"),
    ({**REWARD, **LORA}, ["--gpus", "2x4090"], PAIRS, 0, "lengths", None, "The longest of 16 sides has"),
    ({**REWARD, **LORA}, ["--gpus", "2x4090"], PAIRS, 0, "memory", None, "LoRA r=16"),
    (GRPO, [], {}, 0, "memory", "note", "--gpus 4xA40-48GB"),
    (GRPO, ["--gpus", "1x4090", "--num_processes", "1"], {}, 1, "memory", "problem", "with --allow lora: "),
    (GRPO | LORA, ["--gpus", "2xT4"], {}, 1, "memory", "problem", "7.5, has no bf16. Train in fp16: "),
    ({**GRPO, **LORA, "bf16": False, "fp16": True}, ["--gpus", "2xV100-32GB"], {}, 0, "memory", None, "LoRA r=16"),
    ({**GRPO, **LORA, "bf16": False}, ["--gpus", "2xV100-32GB"], {}, 0, "memory", None, "bf16 is off"),
    (GRPO, ["--gpus", "2xA40-48GB", "--num_processes", "4"], {}, 1, "memory", "problem", "4 processes are launched"),
    ({**GRPO, **LORA}, [*A40S, "--per_device_train_batch_size", "8"], {}, 0, "memory", None, "micro-batch 8 x 2"),
    (ZERO3, A40S, {}, 0, "memory", "ok", "(estimated, rough): ZeRO-3, LoRA"),
    (ZERO3, [*A40S, "--config_file", "multi_gpu"], {}, 0, "memory", "ok", "(estimated, rough): DDP, LoRA"),
    ({**PPO, **LORA, "per_device_train_batch_size": 4}, AS_PPO, {}, 0, "memory", None, "LoRA r=16, adapter critic"),
]


def test_each_step_says_what_it_found(subtests, ask):
    for keys, flags, options, wanted, subject, level, words in SAID:
        with subtests.test(words):
            code, findings = ask(keys, *flags, **options)
            assert code == wanted and words in told(findings, subject, level), findings


def test_what_does_not_fit_is_a_problem_with_what_would(ask):
    code, findings = ask(GRPO, "--gpus", "8xA40-48GB", "--config_file", "multi_gpu")
    problems = told(findings, "memory", "problem")
    assert code == CANNOT_WORK and "DDP, all weights: " in problems
    assert "The same optimisation fits as ZeRO-" in problems


def test_vllm_servers_take_cards_of_the_machine_and_are_planned(ask, capsys):
    code, findings = ask(GRPO | LORA, "--gpus", "4xA100-80GB", "--vllm_servers", "1", model="8B")
    assert code == 0 and "for 3 processes" in told(findings, "recipe") and "4xA100-80GB" in told(findings, "memory")
    assert "neither its memory" not in told(findings, "memory")
    for words in (["--vllm_servers", "2"], ["--vllm_servers", "1", "--vllm_tensor_parallel_size", "2"]):
        with pytest.raises(ConfigError, match="none is left for training"):
            ask(GRPO | LORA, "--gpus", "2xA40-48GB", *words)
    for words, sentence in {
        "--vllm_servers 0": "--vllm_servers is 0",
        "--vllm_servers 1 --use_vllm false": "starts servers, and use_vllm is False",
        "--vllm_servers 1 --vllm_server_port 8000": "a server that runs already",
    }.items():
        with pytest.raises(ConfigError, match=sentence):
            ask(GRPO | LORA, "--gpus", "2xA40-48GB", *words.split())


def test_messages_need_a_chat_template(ask, tmp_path):
    data = files_of(tmp_path, [{"prompt": [{"role": "user", "content": "w3"}], "answer": "w3"}])
    code, findings = ask({**GRPO, "dataset_name": data, "eval_strategy": "no"})
    assert code == CANNOT_WORK and "no chat template" in told(findings, "data", "problem")


def test_what_a_dataset_holds_cannot_steer_the_terminal(capsys):
    print_findings([problem("rules", "gold '\x1b[2J[red]18'.")])
    text = capsys.readouterr().out
    assert "\x1b" not in text and "[red]18" in text


def test_json_stays_json_when_libraries_print(ask, monkeypatch):
    monkeypatch.setattr(check_models, "shape_of", lambda parsed: print("a library was here"))
    code, _ = ask(GRPO)
    assert code == 0


# Memory -----------------------------------------------------------------------------------------------------------


def test_the_recipes_own_deepspeed_file_decides_the_stage(ask, tmp_path):
    file = tmp_path / "engine.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 3, "sub_group_size": 1000}}))
    _, findings = ask({**GRPO, "deepspeed": str(file)}, "--gpus", "8xA100-80GB")
    assert "ZeRO-3, all weights" in told(findings, "memory", "ok")
    assert "ZeRO-3" in told(findings, "deepspeed", "ok")


def test_an_open_launch_is_planned_and_its_file_named(ask):
    code, findings = ask({**GRPO, **LORA}, "--gpus", "4xA40-48GB")
    said = told(findings, "memory", "note")
    assert code == 0
    file = re.search(r"Launch with --config_file (\w+), or write config_file: \1 into the recipe", said)[1]
    numbers, label = said.partition(" on each of ")[0], re.search(r"\(estimated, rough\): (.*?)\.", said)[1]
    for launched in ([{}, ["--config_file", file]], [{"config_file": file}, []]):
        changes, words = launched
        _, findings = ask({**GRPO, **LORA, **changes}, "--gpus", "4xA40-48GB", *words)
        told_now = told(findings, "memory", "ok")
        assert told_now.startswith(numbers) and label in told_now  # following the advice changes no number


def test_a_hub_that_does_not_answer_is_asked_once(assets, tmp_path):
    names = {"model_name_or_path": "me/unheard-of", "dataset_name": "me/rows"}
    recipe = recipes.recipe(tmp_path, **GRPO | names)[1]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        hub = f"http://127.0.0.1:{taken.getsockname()[1]}"
        env = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
        env |= {"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path / "hf"), "COLUMNS": "200"}
        command = [sys.executable, "-m", "trl_ext.cli.main", "check", recipe]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == CANNOT_WORK
    assert f"{hub} does not answer (" in done.stdout and "HF_ENDPOINT=URL" in done.stdout
    assert "Retrying" not in done.stderr and "thrown while requesting" not in done.stderr


def test_launch_files_are_read_and_one_that_is_not_there_is_a_sentence(assets, tmp_path):
    for name, stage, offload in (
        ("zero2", 2, "none"),
        ("zero3", 3, "none"),
        ("zero2_offload", 2, "optimizer"),
        ("zero3_offload", 3, "all"),
    ):
        fields = engine_fields(check_recipe.read_launch(name).engine, find_shape("8B"))
        assert (fields["zero_stage"], fields["offload"]) == (stage, offload)
        assert SHIPPED[stage, offload] == name
    for name, offload in (("fsdp2", "none"), ("fsdp2_offload", "all")):
        fields = engine_fields(check_recipe.read_launch(name).engine, find_shape("8B"))
        assert fields == {"zero_stage": 3, "fsdp": True, "offload": offload}
    assert check_recipe.read_launch("multi_gpu") == check_recipe.Launch(None, None, is_known=True)
    # Automatic buckets are hidden times hidden.
    zero = {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"}
    fields = engine_fields({"zero_optimization": zero}, find_shape(assets / "8B"))
    assert (fields["reduce_bucket_size"], fields["stage3_prefetch_bucket_size"]) == (4096**2, int(0.9 * 4096**2))
    (tmp_path / "list.yaml").write_text("- zero2\n")
    for name, sentence in (
        ("nowhere.yaml", "There is no file"),
        ("zero9", "nearest is"),
        (str(tmp_path / "list.yaml"), r"list\.yaml holds no keys\. Give a launch file"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            check_recipe.read_launch(name)


@pytest.fixture
def planned(assets, tmp_path):
    """The run of a recipe of the 8B model with these keys, and the recipe."""

    def run(*words, processes=2, lengths=(None, None), **keys):
        parsed = check_recipe.parse(write(tmp_path, assets, **GRPO | keys), "grpo", list(words), processes)
        shape = find_shape(assets / "8B")
        return check_memory.run_of_recipe(parsed, shape, processes, check_recipe.Launch(), lengths), parsed

    return run


def test_settings_of_a_job_are_those_of_the_recipe(planned):
    vllm = {"use_vllm": True, "vllm_gpu_memory_utilization": 0.4, "vllm_enable_sleep_mode": True}
    own = {"gradient_checkpointing_kwargs": {"every_n_layers": 2}, "load_in_4bit": True, "beta": 0.1}
    run, _ = planned("--max_tokens_per_forward", "4096", processes=4, **LORA | vllm | own)
    wanted = vllm | {"global_batch": 32, "per_device_train_batch_size": 4, "method": "qlora", "lora_r": 16}
    wanted |= {"dtype": "bfloat16", "checkpoint_every": 2, "max_tokens_per_forward": 4096, "max_completion_length": 6}
    wanted |= {"num_generations": 8, "beta": 0.1, "optim": "adamw_torch_fused", "reward_model": "none"}
    wanted |= {"steps_per_generation": 0}  # all of an optimizer step
    assert {name: getattr(run.job, name) for name in wanted} == wanted
    assert wanted.keys() <= run.given and "zero_stage" not in run.given


def test_trls_float32_is_planned_as_float32(planned):
    job = planned()[0].job
    assert (job.dtype, job.method, job.checkpoint_every) == ("float32", "full", 1)


def test_a_prompt_longer_than_the_recipe_says_is_a_problem_and_counted(planned, assets):
    shape, cards, launch = (
        find_shape(assets / "8B"),
        check_memory.machine("2xH200", None, "", []),
        check_recipe.Launch(),
    )
    for longest, counted in ((700, 700), (90, 600)):
        lengths = (None, Lengths(prompt=longest))
        run, parsed = planned(lengths=lengths, memory="auto", memory_prompt_length=600)
        assert run.job.max_prompt_length == counted
        said = [one.what for one in check_memory.check_memory(parsed, shape, cards, 2, launch, lengths)]
        assert ("A prompt has 700 tokens, and memory_prompt_length is 600." in said) is (longest > 600)


def test_the_config_beside_the_tokenizer_is_the_one_planned(assets):
    assert AutoConfig.from_pretrained(assets / "8B").num_hidden_layers == find_shape(assets / "8B").num_layers == 32


def test_cards_of_this_machine_are_planned_for_if_none_are_named(monkeypatch):
    cards = Facts(gpus=(Gpu("NVIDIA A40", 44.0, 44.0, (8, 6)),) * 2, has_nvlink=False, has_peer_access=True)
    look = import_module("trl_ext.doctor.look")  # the package's `look` is the function in it
    monkeypatch.setattr(look, "look_at_cards", lambda: cards)
    monkeypatch.setattr(look, "host_memory", lambda: look.HostMemory(256.0, 200.0))
    found = check_memory.machine(None, None, "", [])
    assert (found.num_gpus, found.card.name, found.card.total_gib, found.host_gib) == (2, "A40-48GB", 44.0, 200.0)
    monkeypatch.setattr(look, "look_at_cards", lambda: Facts(no_gpus="none"))
    assert check_memory.machine(None, None, "", []) is None
    assert check_memory.machine("2xA40-48GB", None, "", []).card.total_gib == 44.4
    with pytest.raises(ConfigError, match="not in the table of cards"):
        check_memory.machine("4xQuantum9", None, "", [])


# The neighbours ---------------------------------------------------------------------------------------------------


def test_pytorch_answers_the_doctor():
    command = [sys.executable, "-m", "trl_ext.doctor.probe"]
    done = subprocess.run(command, capture_output=True, text=True)
    kernels, complaint = read_answer(done.stdout, done.stderr, done.returncode)
    assert complaint == "" and bool(kernels.works) == bool(kernels.num_gpus)


def test_a_kernel_that_raises_is_told_in_a_line():
    def broken():
        raise RuntimeError("CUDA error: no kernel image is available\nCompile with TORCH_USE_CUDA_DSA")

    assert probe._why_not(broken) == "CUDA error: no kernel image is available"
    assert probe._why_not(lambda: None) == ""


@pytest.mark.parametrize("trainer", check_recipe.TRAINERS)
def test_the_launch_commands_of_the_page_on_memory_are_accepted(trainer):
    page = (ROOT / "docs" / "oom.md").read_text().replace("\\\n", " ")
    (line,) = [line for line in page.splitlines() if line.startswith(f"trl-ext {trainer} ")]
    words = line.split()[2:]
    assert words[:2] == ["--config", "recipe.yaml"]
    found = launch.launch_arguments(f"trl_ext.scripts.{trainer}", check_recipe.make_parser(trainer), words[2:])
    assert found.num_processes == 8 and found.config_file


@pytest.mark.parametrize("copied", [False, True])
def test_cards_that_a_recipe_is_written_for_are_planned_where_there_is_none(
    assets, tmp_path, monkeypatch, capsys, copied
):
    """By the name of a shipped recipe, and by a copy of it; `--gpus` and this machine's cards come first."""
    monkeypatch.setattr(check_memory, "this_machine", lambda: None)
    recipe = "rm-ultrafeedback-6x4090"
    if copied:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "mine.yaml").write_text((ROOT / f"trl_ext/recipes/{recipe}.yaml").read_text())
        recipe = "mine.yaml"
    words = [recipe, "--model_name_or_path", str(assets / "8B"), "--dataset_name", str(assets / "pairs"), "--json"]
    words += ["--eval_strategy", "no"]
    check(words)
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert f"planned for {parse_gpus('6x4090')}, for which the recipe is written. Name others: --gpus" in told(
        findings, "memory", "note"
    )
    assert "for 6 processes" in told(findings, "recipe")
    check([*words, "--gpus", "2xA40-48GB"])
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert "for 2 processes" in told(findings, "recipe") and "is written" not in told(findings, "memory")


@pytest.mark.parametrize("recipe", ["quickstart", "reward", "no-such-recipe", "."])
def test_a_recipe_for_processors_or_any_cards_names_none(recipe, monkeypatch):
    monkeypatch.setattr(check_memory, "this_machine", lambda: None)
    findings = []
    assert check_memory.machine(None, None, recipe, findings) is None and not findings
