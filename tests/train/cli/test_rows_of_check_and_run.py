"""Rows as public data sets have them: `trl-ext check` and the run say the same of each, and neither a traceback."""

import json

import pytest
from tokenizers.processors import TemplateProcessing

from tests import ppo_trainers, recipes, tiny
from tests.nightly import nightly
from trl_ext.cli.check.command import check
from trl_ext.scripts import grpo, ppo, reward

SCRIPTS = {"grpo": grpo, "reward": reward, "ppo": ppo}
OWN = {
    "grpo": dict(num_generations=2, max_completion_length=3, max_steps=1),
    "reward": dict(max_length=32, max_steps=1),
    "ppo": dict(response_length=3, advantage_estimator="reinforce_pp", num_ppo_epochs=1, total_episodes=4),
}
NUMBER, CHOICE = [{"rule": "answer", "gold": "answer", "kind": "number"}], [{"rule": "answer", "gold": "answer"}]
CHOICE[0]["kind"] = "choice"
SHORT = [{"rule": "length", "high": 4, "slack": 4}]


def user(text):
    return {"role": "user", "content": text}


def said(text):
    return {"role": "assistant", "content": text}


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


ASKS, GOOD, BAD = user("w5 w6"), said("w7"), said("w8")
VERL = {"prompt": [ASKS], "reward_model": {"style": "rule", "ground_truth": "11"}, "extra_info": {"split": "train"}}
NESTED, FIRST_PART = {"answer": "reward_model.ground_truth"}, {"prompt": "prompt.0.content.0.text"}
CALLED = "train_dataset has a column '{}', which TRL does not give to reward functions: it is an argument"
# A row, the keys of the recipe, and what is refused: empty where the run trains.
PROMPTS = {
    "answer with a derivation": ({"question": "w5", "answer": "w6 #### 12"}, dict(answer_pattern="#### (.+)"), ""),
    "no column of prompts": ({"question": "w5", "answer": "3"}, {}, "has no column 'prompt', only 'question'"),
    "gold within a column": (VERL, dict(columns=NESTED), ""),
    "gold within a column, misspelt": (
        VERL,
        dict(columns={"answer": "reward_model.ground_trut"}),
        "Did you mean 'reward_model.ground_truth'?",
    ),
    "gold that is a mapping": (VERL, dict(columns={"answer": "reward_model"}), "is neither text nor a number"),
    "numbers in a template": (
        {"nums": [3, 8, 9], "answer": 20},
        dict(prompt_template="w5 {nums}", columns={"answer": "answer"}),
        "",
    ),
    "options in a template": (
        {"ask": "w5", "choices": ["w6", "w7"], "answer": "B"},
        dict(prompt_template="{ask}\n{choices}", rules=CHOICE),
        "",
    ),
    "options and labels": (
        {"ask": "w5", "choices": {"text": ["w6", "w7"], "label": ["A", "B"]}, "key": "A"},
        dict(prompt_template="{ask}\n{choices.text}", columns={"answer": "key"}, rules=CHOICE),
        "",
    ),
    "place of the right option": (
        {"ask": "w5", "choices": ["w6", "w7"], "answer": 1},
        dict(prompt_template="{ask}\n{choices}", rules=CHOICE),
        "no letter A to Z at the start of '1'",
    ),
    "the same, mended": (
        {"ask": "w5", "choices": ["w6", "w7"], "answer": 1},
        dict(prompt_template="{ask}\n{choices}", first_option=0, rules=CHOICE),
        "",
    ),
    "lists of lists": (
        {"grid": [[1], [2]], "answer": 1},
        dict(prompt_template="{grid}"),
        "have a list as 'grid', where prompt_template fills in text, numbers and lists of up to 26 of these",
    ),
    "messages and a solution": ({"messages": [ASKS], "answer": "4"}, dict(columns={"prompt": "messages"}), ""),
    "messages that end with the answer": (
        {"messages": [ASKS, GOOD], "answer": "4"},
        dict(columns={"prompt": "messages"}),
        "the assistant's answer at the end of 'messages', which columns: {prompt: messages.:-1} cuts off",
    ),
    "messages without the answer": (
        {"messages": [ASKS, said("4")]},
        dict(columns={"prompt": "messages.:-1", "answer": "messages.-1.content"}),
        "",
    ),
    "prompt that ends with the answer": ({"prompt": [ASKS, GOOD], "answer": "4"}, {}, ""),
    "from and value": (
        {"prompt": [{"from": "human", "value": "w5"}], "answer": "4"},
        {},
        "have a message without role in its prompt",
    ),
    "turns of from and value": (
        {"conversations": [{"from": "human", "value": "w5"}, {"from": "gpt", "value": "4"}]},
        dict(columns={"prompt": "conversations.:-1", "answer": "conversations.-1.value"}),
        "",
    ),
    "messages as JSON": (
        {"input": json.dumps([ASKS]), "label": "4"},
        dict(columns={"prompt": "input", "answer": "label"}),
        "",
    ),
    "no content": ({"prompt": [{"role": "system", "content": None}, ASKS], "answer": "4"}, {}, "without content"),
    "parts of content": ({"prompt": [user(parts("w5"))], "answer": "4"}, {}, "The chat template refuses them"),
    "parts of content, mended": ({"prompt": [user(parts("w5"))], "answer": "4"}, dict(columns=FIRST_PART), ""),
    "a mapping as prompt": ({"prompt": {"full_text": "w5"}, "answer": "4"}, {}, "have a prompt of type dict"),
    "a text within a column": (
        {"question": {"full_text": "w5"}, "answer": "4"},
        dict(columns={"prompt": "question.full_text"}),
        "",
    ),
    "float golds": ({"prompt": "w5", "answer": 0.5}, {}, ""),
    "golds that are lists": ({"prompt": "w5", "answer": ["8", "w9"]}, {}, ""),
    "null golds": ({"prompt": "w5", "answer": None}, {}, "which is null or NaN in all 8 of its rows"),
    "an empty prompt": ({"prompt": "", "answer": "4"}, {}, "have an empty prompt"),
    "text that is rendered already": (
        {"prompt": "w5 <eos> w6", "answer": "4"},
        dict(prompt_format="chat"),
        "the text of row 0's prompt holds '<eos>', which chat templates write",
    ),
    "text that is rendered already, kept": ({"prompt": "w5 <eos> w6", "answer": "4"}, dict(prompt_format="text"), ""),
    "messages that hold a special token": ({"prompt": [user("w5 <eos>")], "answer": "4"}, {}, ""),
    "a column of TRL's arguments": ({"prompt": "w5", "prompts": "1"}, dict(rules=SHORT), CALLED.format("prompts")),
    "two columns of TRL's arguments": (
        {"prompt": "w5", "completions": "1", "answer": "4", "log_extra": "1"},
        {},
        CALLED.format("completions', 'log_extra"),
    ),
    **{
        f"gold of TRL's argument {name}": (
            {"prompt": "w5", name: "4"},
            dict(rules=[{"rule": "answer", "gold": name}]),
            CALLED.format(name),
        )
        for name in ("trainer_state", "log_extra", "log_metric", "environments")
    },
    "gold that is kept back": (
        {"prompt": "w5", "completion": "4"},
        dict(rules=[{"rule": "answer", "gold": "completion"}]),
        "has a column 'completion', which TRL does not give to reward functions",
    ),
    "ids that are kept back": (
        {"prompt": "w5", "completion_ids": "4"},
        dict(rules=[{"rule": "answer", "gold": "completion_ids"}]),
        "has a column 'completion_ids', which TRL",
    ),
    "columns that no rule reads": (
        {"prompt": "w5", "completion": "w6", "completion_ids": [6], "environments": "w7"},
        dict(rules=SHORT),
        "",
    ),
    "gold that is dropped": (
        {"prompt": "w5", "answer": "4"},
        dict(remove_unused_columns=True),
        "remove_unused_columns=True drops the column 'answer' of train_dataset, which rules reads",
    ),
    "gold that is dropped, PPO": (
        {"prompt": "w5", "answer": "4"},
        dict(remove_unused_columns=True),
        "remove_unused_columns=True drops the column 'answer' of train_dataset, which rules reads",
    ),
    "text, PPO": ({"text": "w5", "label": 1}, dict(columns={"prompt": "text"}, rules=SHORT), ""),
    "another name, PPO": ({"query": "w5"}, dict(rules=SHORT), "has no column 'prompt', only 'query'"),
    "parts of content, PPO": ({"prompt": [user(parts("w5"))]}, dict(rules=SHORT), "The chat template refuses them"),
}
RENAMED = {"prompt": "question", "chosen": "answer_0", "rejected": "answer_1"}
TURNS = {"prompt": [ASKS], "chosen": [GOOD], "rejected": [BAD]}
WHOLE = {"chosen": [ASKS, GOOD], "rejected": [ASKS, BAD]}
PAIRS = {
    "texts": ({"prompt": "w5 ", "chosen": "w7", "rejected": "w8", "margin": 0.5}, {}, ""),
    "texts without prompt": ({"chosen": "w5 w7", "rejected": "w5 w8"}, {}, ""),
    "messages": (TURNS, {}, ""),
    "messages that begin with the prompt": (WHOLE, {}, ""),
    "messages before texts": ({**TURNS, "chosen": "w7", "rejected": "w8"}, {}, ""),
    "messages before texts by other names": (
        {"context": [ASKS], "response1": "w7", "response2": "w8"},
        dict(columns={"prompt": "context", "chosen": "response1", "rejected": "response2"}),
        "",
    ),
    "a column for the better side": (
        {"prompt": "w5 ", "response_0": "w7", "response_1": "w8", "better_response_id": 1},
        dict(columns={"chosen": "response_0", "rejected": "response_1", "better": "better_response_id"}),
        "",
    ),
    "a column that names neither side": (
        {"prompt": "w5 ", "a": "w7", "b": "w8", "winner": "the longer one"},
        dict(columns={"chosen": "a", "rejected": "b", "better": "winner"}),
        "have 'the longer one' as 'winner', which names neither side",
    ),
    "messages next to a text": ({"prompt": "w5", **WHOLE}, {}, "have text next to messages"),
    "the same, mended": ({"prompt": "w5", **WHOLE}, dict(columns={"prompt": None}), ""),
    "a message for a side": (
        {**TURNS, "chosen": {"from": "gpt", "value": "w7"}, "rejected": {"from": "gpt", "value": "w8"}},
        {},
        "have a chosen side of type dict",
    ),
    "a message of from and value for a side": (
        {
            "conversations": [{"from": "human", "value": "w5"}],
            "chosen": {"from": "gpt", "value": "w7"},
            "rejected": {"from": "gpt", "value": "w8"},
        },
        dict(columns={"prompt": "conversations"}),
        "",
    ),
    "token ids by an old name": (
        {"input_ids_chosen": [5, 6], "input_ids_rejected": [5, 7]},
        {},
        "which make no preference pairs. Accepted are",
    ),
    "token ids": ({"chosen_input_ids": [5, 6, 2], "rejected_input_ids": [5, 7, 2]}, {}, ""),
    "a mapping as prompt": (
        {"question": {"full_text": "w5 "}, "answer_0": "w6", "answer_1": "w7"},
        dict(columns=RENAMED),
        "have a prompt of type dict",
    ),
    "a text within a column": (
        {"question": {"full_text": "w5 "}, "answer_0": "w6", "answer_1": "w7"},
        dict(columns=RENAMED | {"prompt": "question.full_text"}),
        "",
    ),
    "parts of content": (
        {"prompt": [user(parts("w5"))], "chosen": [said(parts("w7"))], "rejected": [said(parts("w8"))]},
        {},
        "chat template refuses",
    ),
    "sides that are null": ({"prompt": "w5", "chosen": None, "rejected": "w8"}, {}, "have an empty side"),
}
FORMS = {("ppo" if name.endswith("PPO") else "grpo", name): form for name, form in PROMPTS.items()}
FORMS |= {("reward", name): form for name, form in PAIRS.items()}
# Runs take some seconds.
DAILY = ("gold within a column", "parts of content", "messages next to a text", "a message for a side", "token ids")
DAILY += ("token ids by an old name", "a mapping as prompt", "text, PPO", "place of the right option")
DAILY += ("text that is rendered already", "messages before texts by other names", "a column for the better side")
DAILY += ("messages that end with the answer", "turns of from and value", "a message of from and value for a side")
DAILY += (
    "two columns of TRL's arguments",
    "ids that are kept back",
    "columns that no rule reads",
    "gold that is dropped",
)


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    """A tiny model whose chat template takes texts, not parts."""
    folder = tmp_path_factory.mktemp("assets")
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ '<' + m.role + '> ' + m.content + ' ' }}{% endfor %}"
    tokenizer.chat_template += "{% if add_generation_prompt %}<assistant>{% endif %}"
    return recipes.save(folder / "model", tokenizer=tokenizer)


def cases():
    for kind, name in FORMS:
        yield (kind, name) if name in DAILY else nightly(kind, name)


@pytest.fixture
def recipe_of(assets, tmp_path):
    """Write a form's rows and recipe; return the recipe's path and what is refused."""

    def write(kind, name):
        row, keys, refused = FORMS[kind, name]
        keys = dict(columns={"prompt": "question"}) | keys if "derivation" in name else keys
        rows = recipes.write_rows(tmp_path / "rows.jsonl", [row] * 8)
        where = dict(model_name_or_path=str(assets), dataset_name=str(rows), output_dir=str(tmp_path / "out"))
        own = recipes.SMALL | OWN[kind] | ({} if kind == "reward" else {"rules": NUMBER})
        return recipes.recipe(tmp_path, **own | where | keys)[1], refused

    return write


@pytest.mark.parametrize(("kind", "name"), cases())
def test_the_run_and_the_check_say_the_same_of_a_form_of_rows(kind, name, recipe_of, capfd):
    recipe, refused = recipe_of(kind, name)
    code = check([recipe, "--trainer", kind, "--json"])
    problems = [f["what"] for f in json.loads(capfd.readouterr().out)["findings"] if f["level"] == "problem"]
    assert code == bool(refused), problems
    if not refused:
        SCRIPTS[kind].main(["--config", recipe])
        return
    error = recipes.stopped(capfd, SCRIPTS[kind].main, ["--config", recipe])
    sentence = next(line for line in error.splitlines() if line.startswith("error: ")).removeprefix("error: ")
    assert refused in sentence
    assert problems[0] == sentence


def test_no_form_of_rows_ends_a_check_in_a_traceback(recipe_of, capsys, subtests):
    for kind, name in FORMS:
        with subtests.test(name, kind=kind):
            recipe, refused = recipe_of(kind, name)
            assert check([recipe, "--trainer", kind, "--json"]) == bool(refused)


def test_an_answer_at_the_end_of_a_prompt_is_named_by_check_and_run_with_the_way_out(recipe_of, capfd, caplog):
    recipe, _ = recipe_of("grpo", "prompt that ends with the answer")
    check([recipe, "--json"])
    (note,) = [f["what"] for f in json.loads(capfd.readouterr().out)["findings"] if "ends with the" in f["what"]]
    assert note.startswith("train_dataset: row 0 has a prompt that ends with the assistant's answer")
    assert "dataset.map(lambda row: {'prompt': row['prompt'][:-1]})" in note
    caplog.clear()
    grpo.main(["--config", recipe])
    assert note in caplog.messages


@pytest.mark.parametrize("column", ["prompt", "answer"])
@pytest.mark.parametrize("row", [0, 15])
def test_a_file_that_is_not_utf8_is_refused_by_check_and_run_with_its_row(row, column, recipe_of, tmp_path, capfd):
    recipe, _ = recipe_of("grpo", "float golds")
    lines = [json.dumps({"prompt": "w5", "answer": "4"}).encode()] * 16
    lines[row] = lines[row].replace(
        b'"4"' if column == "answer" else b"w5", b'"4\xe9"' if column == "answer" else b"w\xe9"
    )
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join(lines))
    refused = f"row {row} has bytes that are no UTF-8 in the column '{column}'. Convert the file: iconv -f LATIN1"
    check([recipe, "--json"])
    problems = [f["what"] for f in json.loads(capfd.readouterr().out)["findings"] if f["level"] == "problem"]
    assert refused in problems[0]
    assert refused in recipes.stopped(capfd, grpo.main, ["--config", recipe])


def test_a_byte_order_mark_within_a_file_is_refused_with_its_line(recipe_of, tmp_path, capfd):
    recipe, _ = recipe_of("grpo", "float golds")
    line = json.dumps({"prompt": "w5", "answer": "4"}).encode() + b"\n"
    (tmp_path / "rows.jsonl").write_bytes(b"\xef\xbb\xbf" + line * 9 + b"\xef\xbb\xbf" + line * 6)
    assert "rows.jsonl, line 10: Unexpected UTF-8 BOM" in recipes.stopped(capfd, grpo.main, ["--config", recipe])


@pytest.mark.parametrize("kind", ["grpo", "reward"])
def test_a_text_that_begins_with_bos_twice_is_pointed_out_by_check_and_run(
    kind, recipe_of, assets, tmp_path, capfd, caplog
):
    tokenizer = tiny.tokenizer()
    processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    tokenizer.backend_tokenizer.post_processor = processor
    model = recipes.save(tmp_path / "model", tokenizer=tokenizer)
    recipe, _ = recipe_of(kind, "float golds" if kind == "grpo" else "texts")
    rows = recipes.write_rows(
        tmp_path / "rows.jsonl", [{"prompt": "<bos> w5 ", "chosen": "w6", "rejected": "w7", "answer": "4"}] * 8
    )
    words = ["--model_name_or_path", str(model), "--dataset_name", str(rows)]
    sentence = "row 0 begins with <bos>, and the tokenizer adds another: the model reads <bos> twice."
    check([recipe, "--trainer", kind, "--json", *words])
    notes = [f["what"] for f in json.loads(capfd.readouterr().out)["findings"] if f["level"] == "note"]
    assert any(sentence in what for what in notes), notes
    caplog.clear()
    SCRIPTS[kind].main(["--config", recipe, *words])
    assert sentence in caplog.text


OTHER_WORDS = {"<pad>": 0, "<bos>": 1, "<eos>": 2} | {f"w{i}": i for i in range(3, tiny.VOCAB - 1)} | {"w": 198}


@pytest.mark.parametrize(
    ("key", "size", "words"),
    [
        ("value_model", tiny.VOCAB, "has other tokens than the actor's: 198 is 'w' there and 'w198' here"),
        ("reward_model", 77, "has an embedding of 77 tokens, and the tokenizer that reads for it has token 198"),
    ],
)
def test_a_model_of_other_tokens_is_named_alike_by_check_and_run(key, size, words, assets, tmp_path, capfd):
    ppo_trainers.classifier(vocab_size=size).save_pretrained(tmp_path / "other")
    if key == "value_model":  # a reward model without a tokenizer reads the actor's tokens
        tiny.tokenizer(OTHER_WORDS).save_pretrained(tmp_path / "other")
    rows = recipes.write_rows(tmp_path / "rows.jsonl", [{"prompt": "w5"}] * 8)
    keys = {"value_model": str(tmp_path / "other"), "rules": SHORT}
    keys = keys if key == "value_model" else {"reward_model": [str(tmp_path / "other")]}
    keys |= dict(model_name_or_path=str(assets), dataset_name=str(rows), output_dir=str(tmp_path / "out"))
    recipe = recipes.recipe(tmp_path, **recipes.SMALL, **keys, response_length=3, total_episodes=4)[1]
    check([recipe, "--trainer", "ppo", "--json"])
    problems = [f["what"] for f in json.loads(capfd.readouterr().out)["findings"] if f["level"] == "problem"]
    error = recipes.stopped(capfd, ppo.main, ["--config", recipe])
    assert words in error and problems and f"error: {problems[0]}" in error
