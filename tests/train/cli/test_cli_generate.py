"""`trl-ext generate`: a row in a batch says what it says alone, and vLLM is asked for the same in its own words."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from tests import fake_vllm, tiny
from tests.recipes import stopped, write_rows
from trl_ext.cli.after.command import json_line
from trl_ext.cli.after.engines import Sampling, TransformersEngine
from trl_ext.cli.after.finished import find_run
from trl_ext.cli.after.prompts import policy_prompts, recipe_mapping
from trl_ext.cli.main import main
from trl_ext.errors import DataError
from trl_ext.monitor.record import write_record
from trl_ext.trainers.checkpoints.manifest import Manifest, files_in, measured
from trl_ext.trainers.forward.reward_input import RECORD_FILE

PROMPTS = ["w3", "w5 w6 w7 w8 w9", "w11 w4", "w90 w91 w92"]
_SAID = "{% for m in messages %}{{ 'w100 ' + m['content'] + ' ' }}{% endfor %}"
CHAT_TEMPLATE = _SAID + "{% if add_generation_prompt %}w101{% endif %}"
VERSIONS = {"trainer": "grpo", "packages": {}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A run of an adapter that ends some answers, and its base model."""
    folder = tmp_path_factory.mktemp("runs")
    model = tiny.model("llama")
    model.lm_head.weight.data *= 10  # so that a hidden state can make a token likely
    model.generation_config.repetition_penalty = 1.7  # the training's own counts, not this
    model.save_pretrained(folder / "base")
    torch.manual_seed(1)
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    adapted = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear"))
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.2)
    adapted.save_pretrained(folder / "run")
    tiny.tokenizer().save_pretrained(folder / "run")
    return SimpleNamespace(base=folder / "base", run=folder / "run")


@pytest.fixture
def prompts(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    file = tmp_path / "prompts.txt"
    file.write_text("\n\n".join(PROMPTS) + "\n")
    return file


def rows_of(text):
    return [json.loads(line) for line in text.splitlines()]


def alone(folders, ids, num_tokens=6):
    """Greedy tokens after one row of ids, chosen one by one from the adapter's logits."""
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folders.base), folders.run).eval()
    ids = list(ids)
    for _ in range(num_tokens):
        with torch.no_grad():
            ids.append(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax().item())
        if ids[-1] == 2:
            break
    return ids


def test_a_row_in_a_batch_says_what_it_says_alone(folders, prompts, capsys):
    argv = ["generate", str(folders.run), "--prompts", str(prompts), "--temperature", "0", "--max_new_tokens", "6"]
    assert main([*argv, "--batch_size", "3"]) == 0
    captured = capsys.readouterr()
    rows = rows_of(captured.out)
    assert [row["prompt"] for row in rows] == PROMPTS
    tokenizer = tiny.tokenizer()
    for row in rows:
        ids = tokenizer(row["prompt"]).input_ids
        said = alone(folders, ids)[len(ids) :]
        assert row["completions"] == [tokenizer.decode(said, skip_special_tokens=True)]
        assert row["finish_reasons"] == ["stop" if said[-1] == 2 else "length"]
    assert "4/4" in captured.err and " tokens" in captured.err


def test_a_run_of_a_program_says_once_that_its_prompts_are_not_known(folders, prompts, tmp_path, capsys):
    for number, recipe in enumerate(({"dataset_name": "some/data"}, {"seed": 1})):
        run = tmp_path / f"run{number}"
        run.mkdir()
        for file in folders.run.iterdir():
            (run / file.name).symlink_to(file)
        write_record(run, recipe, VERSIONS)
        assert generate(run, "--prompts", prompts, "--max_new_tokens", 2) == 0
        assert capsys.readouterr().err.count("was trained by a Python program, and its record does not") == number


def test_a_completion_ends_with_the_first_stop_token(folders):
    run = find_run(str(folders.run))
    engine = TransformersEngine(run, run.load_tokenizer())
    sampling = Sampling(temperature=0, max_new_tokens=6)
    ids = [tiny.tokenizer()(prompt).input_ids for prompt in PROMPTS]
    before = [found for (found,) in engine(ids, sampling)]
    third = before[0].token_ids[2]
    engine._stop_ids = [2, third]
    after = [found for (found,) in engine(ids, sampling)]
    assert after[0].token_ids == before[0].token_ids[: before[0].token_ids.index(third) + 1]
    assert (before[0].finish_reason, after[0].finish_reason) == ("length", "stop")
    assert all(a.token_ids == b.token_ids[: len(a.token_ids)] for a, b in zip(after, before, strict=True))


def test_samples_are_groups_in_the_order_of_the_prompts_and_repeat_with_their_seed(folders, prompts, tmp_path):
    argv = ["generate", str(folders.run), "--prompts", str(prompts), "--num_generations", "5", "--max_new_tokens", "4"]
    found = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        file = tmp_path / "new" / f"{name}.jsonl"
        assert main([*argv, "--batch_size", "7", "--seed", str(seed), "--output", str(file)]) == 0
        found.append(rows_of(file.read_text()))
    assert found[0] == found[1] != found[2]
    assert [row["prompt"] for row in found[0]] == PROMPTS
    assert all(len(row["completions"]) == 5 and len(set(row["completions"])) > 1 for row in found[0])


def test_a_batch_that_does_not_fit_is_halved(folders, monkeypatch):
    run = find_run(str(folders.run))
    engine = TransformersEngine(run, run.load_tokenizer(), batch_size=8)
    whole, sizes = engine._batch, []

    def limited(rows, sampling):
        sizes.append(len(rows))
        if len(rows) > 2:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        return whole(rows, sampling)

    ids, sampling = [[3], [4, 5], [6]], Sampling(temperature=0, max_new_tokens=3)
    wanted = list(engine(ids, sampling))
    monkeypatch.setattr(engine, "_batch", limited)
    assert list(engine(ids, sampling)) == wanted
    assert sizes == [3, 3, 2, 1]


def test_the_trainings_own_settings_count(folders, tmp_path):
    recipe = {"temperature": 0.6, "max_completion_length": 9, "top_p": 0.9, "top_k": 20, "beta": 0.0}
    write_record(tmp_path, recipe, VERSIONS)
    own = Sampling(temperature=0.6, max_new_tokens=9, top_p=0.9, top_k=20)
    asked = dict.fromkeys(("num_generations", "temperature", "max_new_tokens", "seed"))
    assert Sampling.of(recipe, SimpleNamespace(**asked)) == own
    assert Sampling.of(recipe, SimpleNamespace(**asked | {"temperature": 0.0})).temperature == 0
    assert Sampling.of({"response_length": 53}, SimpleNamespace(**asked)).max_new_tokens == 53


def test_a_line_of_text_is_a_user_message_where_there_is_a_chat_template(folders, prompts, tmp_path, capsys):
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    run = tmp_path / "run"
    run.mkdir()
    for file in folders.run.iterdir():
        (run / file.name).write_bytes(file.read_bytes())
    tokenizer.save_pretrained(run)
    argv = ["generate", str(run), "--temperature", "0", "--max_new_tokens", "4", "--prompts"]
    assert main([*argv, str(prompts)]) == 0
    chats = rows_of(capsys.readouterr().out)
    assert [row["prompt"] for row in chats] == [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    ids = [100, 11, 4, 101]
    assert chats[2]["completions"] == [tiny.tokenizer().decode(alone(folders, ids, 4)[4:], skip_special_tokens=True)]
    assert main([*argv, str(prompts), "--prompt_format", "text"]) == 0
    assert [row["prompt"] for row in rows_of(capsys.readouterr().out)] == PROMPTS
    # The rows of a .jsonl file are read as a training reads them: text stays text.
    data = tmp_path / "rows.jsonl"
    write_rows(data, [{"prompt": row["prompt"]} for row in chats])
    assert main([*argv, str(data)]) == 0
    assert [row["completions"] for row in rows_of(capsys.readouterr().out)] == [row["completions"] for row in chats]
    write_rows(data, [{"prompt": "w9"}])
    assert main([*argv, str(data)]) == 0
    assert [row["prompt"] for row in rows_of(capsys.readouterr().out)] == ["w9"]


MADE = [
    ({"prompt_template": "{question} w9"}, {"question": "w5"}, "w5 w9"),
    ({"prompt_template": "{question} w9"}, {"prompt": "w5"}, "w5 w9"),
    ({"columns": {"prompt": "question", "answer": "gold"}}, {"question": "w5"}, "w5"),
    ({"columns": {"answer": "gold"}, "answer_pattern": "#(.)", "first_option": 0}, {"prompt": "w5"}, "w5"),
    ({"columns": {"prompt": "turns.0.value"}}, {"turns": [{"value": "w5"}]}, "w5"),
    ({"prompt_template": "{ask.text} w9"}, {"ask": {"text": "w5"}}, "w5 w9"),
]


def test_prompts_are_made_as_the_recipe_makes_them():
    for recipe, row, wanted in MADE:
        assert policy_prompts([row], "rows.jsonl", recipe_mapping(recipe), has_template=False) == [wanted]
        chat = {**recipe, "system_prompt": "w8"}
        messages = [{"role": "system", "content": "w8"}, {"role": "user", "content": wanted}]
        assert policy_prompts([row], "rows.jsonl", recipe_mapping(chat), has_template=True) == [messages]
    mapping = recipe_mapping({"prompt_template": "{question} {hint}"})
    rows = [{"question": "w5", "hint": "w6"}, {"question": "w5"}]
    with pytest.raises(DataError, match=r"row 1 .*no 'hint' \(null\)"):
        policy_prompts(rows, "rows.jsonl", mapping, has_template=False)
    with pytest.raises(DataError, match=r"rows\.jsonl has no column 'hint', of which the run's recipe makes prompts"):
        policy_prompts([{"question": "w5"}], "rows.jsonl", mapping, has_template=False)


FILES = [
    ("empty.txt", "\n \n", "holds no prompt"),
    ("empty.jsonl", "", "cannot be read"),
    ("rows.jsonl", '{"question": "w4"}\n', "has no column 'prompt'; its columns are: question"),
    ("rows.jsonl", '{"prompt": "w4"}\n{"prompt": null}\n', "The prompt of row 1 of"),
    ("rows.jsonl", '{"prompt": "w4"}\n{"prompt": \n', "cannot be read"),
    ("rows.md", "prompt\nw4\n", "is none of .jsonl"),
    ("chat.jsonl", '{"prompt": [{"role": "user", "content": "w4"}]}\n', "has no chat template"),
    ("rows.jsonl", '{"prompt": "w4"}\n{"prompt": " "}\n', "Prompt 1 has no token: ' '"),
]


def generate(*argv):
    return main(["generate", *map(str, argv)])


def test_a_file_without_prompts_is_one_sentence(subtests, folders, tmp_path, capsys):
    for name, text, sentence in FILES:
        (tmp_path / name).write_text(text)
        with subtests.test(sentence):
            assert sentence in stopped(capsys, generate, folders.run, "--prompts", tmp_path / name)


def test_settings_that_cannot_work_are_one_sentence(folders, prompts, tmp_path, capsys):
    assert "cannot be read as UTF-8 text" in stopped(capsys, generate, folders.run, "--prompts", tmp_path / "none.txt")
    asked = ["--prompts", prompts]
    assert "--max_new_tokens is 0" in stopped(capsys, generate, folders.run, *asked, "--max_new_tokens", 0)
    assert "--batch_size is 0" in stopped(capsys, generate, folders.run, *asked, "--batch_size", 0)
    assert "--temperature is -1" in stopped(capsys, generate, folders.run, *asked, "--temperature=-1")
    greedy = ["--temperature", 0, "--num_generations", 2]
    assert "would all be equal" in stopped(capsys, generate, folders.run, *asked, *greedy)
    (tmp_path / "there.jsonl").write_text("mine")
    assert "is there already" in stopped(capsys, generate, folders.run, *asked, "--output", tmp_path / "there.jsonl")
    assert "vLLM is not installed" in stopped(capsys, generate, folders.run, *asked, "--backend", "vllm")


def test_a_hostile_completion_is_one_line_that_no_terminal_obeys():
    row = {"completions": ["a\x1b[2J\n\u202eb\u2028c\x9b1m", "中文"]}
    line = json_line(row)
    assert line.isprintable() and "中文" in line and json.loads(line) == row


def test_vllm_is_given_the_adapter_and_the_ids(monkeypatch, folders, prompts, capsys):
    made = fake_vllm.install(monkeypatch)
    argv = ["generate", str(folders.run), "--prompts", str(prompts), "--backend", "vllm", "--num_generations", "2"]
    assert main(argv) == 0
    rows = rows_of(capsys.readouterr().out)
    assert [row["completions"] for row in rows] == [[prompt.split()[-1]] * 2 for prompt in PROMPTS]
    assert {reason for row in rows for reason in row["finish_reasons"]} == {"stop"}
    asked = dict(model=str(folders.base), enable_lora=True, max_lora_rank=8, revision=None, lora=str(folders.run))
    assert made == [asked]


def shorten(path):
    path.write_bytes(path.read_bytes()[:-9])


def edit(run, **changes):
    path = run / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def broken_record(run):
    for name in ("recipe.yaml", "versions.json"):
        (run / name).write_text("a: [1")


DAMAGED = [
    ("holds no weights (adapter_model.safetensors)", lambda run: (run / "adapter_model.safetensors").unlink()),
    ("was not written to its end", lambda run: shorten(run / "adapter_model.safetensors")),
    ("adapter_config.json cannot be read", lambda run: (run / "adapter_config.json").write_text('{"r": ')),
    ("The base model of", lambda run: edit(run, base_model_name_or_path="/gone")),
    ("does not name its base model", lambda run: edit(run, base_model_name_or_path=None)),
    ("recipe.yaml is damaged", broken_record),
    ("does not fit the model", lambda run: edit(run, r=3)),
    ("does not fit the model", lambda run: edit(run, target_modules=["q_proj", "lm_head"])),
    ("cannot be loaded", lambda run: (run / "tokenizer.json").write_text("{")),
    ("is a reward model, which writes no text", lambda run: edit(run, task_type="SEQ_CLS")),
    ("is a reward model, which writes no text", lambda run: (run / RECORD_FILE).write_text("{}")),
]


def test_half_a_run_is_one_sentence(subtests, folders, prompts, tmp_path, capsys):
    for number, (sentence, damage) in enumerate(DAMAGED):
        run = shutil.copytree(folders.run, tmp_path / f"run{number}")
        damage(run)
        with subtests.test(sentence, number=number):
            assert sentence in stopped(capsys, generate, run, "--prompts", prompts)
    for name, sentence in (("nowhere", "There is no folder"), ("", "holds neither a model nor a whole checkpoint")):
        assert sentence in stopped(capsys, generate, tmp_path / name, "--prompts", prompts)


def test_an_output_dir_without_final_model_stands_for_its_newest_whole_checkpoint(folders, prompts, tmp_path, capsys):
    for step in (1, 2, 3):
        folder = shutil.copytree(folders.run, tmp_path / f"checkpoint-{step}")
        Manifest(step, {name: measured(folder / name) for name in files_in(folder)}, run={}).write(folder)
    shorten(tmp_path / "checkpoint-3" / "adapter_model.safetensors")
    assert find_run(str(tmp_path)).folder == tmp_path / "checkpoint-2"
    assert "is not complete" in stopped(capsys, generate, tmp_path / "checkpoint-3", "--prompts", prompts)
    unfinished = tmp_path / "_unfinished" / "checkpoint-1"
    shutil.move(tmp_path / "checkpoint-1", unfinished)
    assert "was not written to its end" in stopped(capsys, generate, unfinished, "--prompts", prompts)


@pytest.fixture
def with_recipe(folders, tmp_path):
    """The same run with a record of these settings."""

    def make(**recipe):
        folder = tmp_path / "recorded"
        folder.mkdir()
        for file in folders.run.iterdir():
            (folder / file.name).symlink_to(file)
        write_record(folder, {"dataset_name": "none", **recipe}, VERSIONS, None)
        return folder

    return make


def test_the_stop_token_of_ppo_ends_completions_as_in_training(folders, prompts, with_recipe, capsys):
    ids = tiny.tokenizer()(PROMPTS[0]).input_ids
    said = alone(folders, ids)[len(ids) + 2]
    run = with_recipe(stop_token_id=said, generation_kwargs={"suppress_tokens": [7]}, temperature=1.0)
    words = ["--temperature", "0", "--max_new_tokens", "6"]
    assert main(["generate", str(run), "--prompts", str(prompts), *words]) == 0
    printed = capsys.readouterr()
    assert rows_of(printed.out)[0]["finish_reasons"] == ["stop"]
    assert rows_of(printed.out)[0]["completions"][0].split()[-1] == f"w{said}"
    assert "generation_kwargs of" in printed.err and "{'suppress_tokens': [7]}" in printed.err


def test_vllm_ends_on_the_stop_token_of_ppo_alone(monkeypatch, prompts, with_recipe, capsys):
    fake_vllm.install(monkeypatch)  # which checks that a run without EOS stops at token 3
    assert main(["generate", str(with_recipe(stop_token_id=3)), "--prompts", str(prompts), "--backend", "vllm"]) == 0
