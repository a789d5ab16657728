"""Forty kinds of bad data for GRPO and PPO: one sentence with row numbers, before a model is touched."""

import datetime
import random

import pyarrow as pa
import pytest
import torch
from datasets import Dataset, Features, IterableDataset, Json, List, Value

from tests import ppo_trainers, tiny
from tests.rollouts import rollout
from trl_ext import GRPOConfig, GRPOTrainer, RuleSet
from trl_ext.errors import ConfigError, DataError
from trl_ext.rewards import Answer, Call, Code, Math
from trl_ext.trainers.rows.screen import suspects
from trl_ext.trainers.rows.text import TextCheck

torch.set_num_threads(1)

TEMPLATE = "{% for m in messages %}<bos> {{ m['role'] }} {{ m['content'] }} {% endfor %}"
STRICT = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + TEMPLATE
GOOD = "w5 w6"


def zero(completions, **_):
    return [0.0] * len(completions)


def user(content, role="user", **more):
    return {"role": role, "content": content, **more}


def texts(*bad, good=4):
    return Dataset.from_dict({"prompt": [GOOD] * good + list(bad)})


def chats(*bad, good=4):
    return Dataset.from_dict({"prompt": [[user(GOOD)]] * good + list(bad)})


def rows(column="answer", values=(), **more):
    return Dataset.from_dict({"prompt": [GOOD] * len(values), column: list(values), **more})


def mixed(*prompts):
    return Dataset.from_dict({"prompt": list(prompts)}, features=Features({"prompt": Json()}))


def broken_utf8():
    raw = pa.array([b"w5", b"w6", b"w\xff"], pa.binary())
    return Dataset(pa.table({"prompt": pa.StringArray.from_buffers(3, raw.buffers()[1], raw.buffers()[2])}))


def stream(*prompts, good=0):
    return IterableDataset.from_generator(lambda: ({"prompt": p} for p in [GOOD] * good + list(prompts)))


def needs_solution(completions, solution, **_):
    return [0.0] * len(completions)


def takes_completions_alone(completions):
    return [0.0] * len(completions)


ANSWER = [RuleSet([Answer()])]
# name: (rows, what the sentence says, what is given beside the rows)
BAD = {
    "null": (texts(None), "row 4 has no prompt", {}),
    "all null": (texts(None, None, good=0), "rows 0, 1 have no prompt", {}),
    "empty": (texts(""), "row 4 has an empty prompt", {}),
    "blank": (texts(" \n\t"), "row 4 has a blank prompt", {}),
    "blank in Unicode": (texts("\u00a0\u3000"), "row 4 has a blank prompt", {}),
    "many": (texts("", "", "", "", None), "rows 4, 5, 6 and 1 more have an empty prompt; row 8 has no prompt", {}),
    "invisible": (texts("\ufeff\u200b\u00ad\u202e\u2066\x01\u3164"), "row 4 has a blank prompt", {}),
    "invisible messages": (chats([user("\u200b")]), "row 4 has a prompt whose messages are empty", {}),
    "an unknown role": (
        chats([user("w5", role="wizard")]),
        "row 4 has a message in its prompt with the role 'wizard', which the chat template does not name",
        {},
    ),
    "an image that is text": (texts().add_column("image", ["w5"] * 4), "the column 'image', which TRL takes for", {}),
    "images that are null": (texts().add_column("images", [None] * 4), "the column 'images', which TRL takes", {}),
    "a list": ([{"prompt": GOOD}], r"train_dataset is a list. Make a dataset of it: datasets.Dataset.from_list", {}),
    "a DataFrame": (texts().to_pandas(), r"is a DataFrame. Make a dataset of it: datasets.Dataset.from_pandas", {}),
    "splits": ({"train": texts(), "test": texts()}, "train_dataset holds the splits 'train', 'test'. Give one", {}),
    "integers": (texts(7, good=0), "row 0 has a prompt of type int", {}),
    "floats": (texts(0.5, good=0), "row 0 has a prompt of type float", {}),
    "truth values": (texts(True, good=0), "row 0 has a prompt of type bool", {}),
    "bytes": (texts(b"w5", good=0), "row 0 has a prompt of type bytes", {}),
    "a mapping": (texts({"text": "w5"}, good=0), "row 0 has a prompt of type dict", {}),
    "a list of texts": (texts(["w5"], good=0), "row 0 has a prompt that is a list of str", {}),
    "tokens": (texts([5, 6], good=0), "row 0 has a prompt that is a list of int", {}),
    "a number among texts": (mixed(GOOD, 7), "row 1 has a prompt of type int", {}),
    "messages among texts": (mixed(GOOD, [user(GOOD)]), "row 1 has messages as prompt, where the first", {}),
    "a text among messages": (mixed([user(GOOD)], GOOD), "row 1 has text as prompt, where the first", {}),
    "NUL": (texts("w5\0w6"), "row 4 has a NUL character in its prompt", {}),
    "no UTF-8": (broken_utf8(), "row 2 has a character that is no Unicode", {}),
    "end of text only": (texts("<eos>"), "row 4 has a prompt of special tokens only", {}),
    "padding only": (texts("<pad> <pad>\n<eos>"), "row 4 has a prompt of special tokens only", {}),
    "no messages": (chats([]), "row 4 has a prompt without messages", {}),
    "null among messages": (chats(None), "row 4 has no prompt", {}),
    "no role": (chats([{"content": GOOD}], good=0), "row 0 has a message without role", {}),
    "null role": (chats([user(GOOD, role=None)]), "row 4 has a message without role", {}),
    "blank role": (chats([user(GOOD, role=" ")]), "row 4 has a message without role", {}),
    "no content": (chats([{"role": "user"}], good=0), "row 0 has a message without content", {}),
    "null content": (chats([user(GOOD), user(None)]), "row 4 has a message without content", {}),
    "content is a number": (chats([user(7)], good=0), "whose content is of type int", {}),
    "blank messages": (chats([user(""), user(" ")]), "row 4 has a prompt whose messages are empty", {}),
    "NUL in a message": (chats([user("w5\0")]), "row 4 has a NUL character", {}),
    "no parts": (chats([user([])], good=0), "row 0 has a prompt whose messages are empty", {}),
    "no chat template": (chats(), "rows 0, 1, 2 and 1 more have messages, and the tokenizer has no chat", {}),
    "refused roles": (
        chats([user("w5", role="system"), user("w6")]),
        "row 4 has messages from system, user. The chat template refuses them: no system role",
        {"template": STRICT},
    ),
    "longer than the model": (texts("w5 " * 600), "row 4 has a prompt that leaves no room .* 512 tokens", {}),
    "messages longer than the model": (chats([user("w5 " * 600)]), "row 4 has a prompt that leaves no room", {}),
    "prompts beside prompts": (texts().add_column("prompts", [1] * 4), "has a column 'prompts', and TRL calls", {}),
    "completions": (texts().add_column("completions", [1] * 4), "'completions', and TRL calls", {}),
    "trainer_state": (texts().add_column("trainer_state", [1] * 4), "'trainer_state', and TRL calls", {}),
    "gold all null": (
        rows(values=[None] * 8),
        "rule 'answer' reads the column 'answer', which is null or NaN in all 8",
        {"rewards": ANSWER},
    ),
    "gold all NaN": (rows(values=[float("nan")] * 8), "in all 8 of its rows", {"rewards": ANSWER}),
    "gold null where the rule counts": (
        rows(values=[None, "1"] * 4, kind=["a", "b"] * 4),
        "in all 4 of its rows",
        {"rewards": [RuleSet([Answer(when={"kind": "a"})])]},
    ),
    "gold that TRL keeps": (
        rows("completion", ["1"] * 8),
        "reads the column 'completion' of train_dataset, which TRL does not hand on",
        {"rewards": [RuleSet([Answer(gold="completion")])]},
    ),
    "gold that is dropped": (
        rows(values=["1"] * 8),
        "remove_unused_columns=True drops the column 'answer'",
        {"rewards": ANSWER, "remove_unused_columns": True},
    ),
    "a column that a function lacks": (
        texts(),
        "needs_solution needs the argument 'solution', which is a column for TRL, and train_dataset has 'prompt'",
        {"rewards": [needs_solution]},
    ),
    "a function without **kwargs": (
        rows(values=["1"] * 8),
        "takes_completions_alone takes no argument 'answer', 'completion_ids', .*Add \\*\\*kwargs",
        {"rewards": [takes_completions_alone]},
    ),
    "no column": (texts().rename_column("prompt", "question"), "no column 'prompt'", {}),
    "no rows": (texts(good=0), "is empty", {}),
    "no gold": (texts(), "no column 'answer'", {"rewards": ANSWER}),
    "evaluation": (None, "eval_dataset: row 1000 has no prompt", {"eval_dataset": texts(None, good=1000)}),
    "one of several evaluations": (
        None,
        r"eval_dataset\['b'\]: row 4 has an empty prompt",
        {"eval_dataset": {"a": texts(), "b": texts("")}},
    ),
}


BAD_TOKENS = {
    "null": ([[5, 6], None], "row 1 has no input_ids"),
    "none": ([[5, 6], []], "row 1 has no input_ids"),
    "negative": ([[5, 6], [5, -100]], "row 1 has input_ids outside the 199 tokens"),
    "foreign": ([[5, 6], [5, 199]], "row 1 has input_ids outside the 199 tokens"),
    "texts": (["w5", "w6"], "rows 0, 1 have no input_ids"),
    "special": ([[5, 6], [0, 2]], "row 1 has a prompt of special tokens only"),
}


# Golds that no completion can meet: the rule, and the column in every row.
SUITE = Code(mode="asserts", tests="answer", require="L0")
UNREADABLE = {
    "bool": (Answer(), True),
    "dict": (Answer(), {"value": "18"}),
    "bytes": (Answer(), b"18"),
    "date": (Answer(), datetime.date(2026, 1, 2)),
    "prose": (Answer(), "it depends"),
    "blank": (Answer(), " "),
    "list of nothing": (Answer(), []),
    "broken LaTeX": (Math(), "\\frac{1}{"),
    "broken tests": (SUITE, "assert ("),
    "no tests": (SUITE, ""),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_golds_that_no_rule_can_read_are_told_before_the_model_is_touched(kind, tmp_path):
    rule, gold = UNREADABLE[kind]
    data = rows(values=[gold] * 8)
    with pytest.raises(DataError, match=rf"'{rule.name}' can read the gold of none of the 8 rows") as caught:
        grpo(tmp_path, data, rewards=[RuleSet([rule, Call(len, isolate=False)])], model=Untouched())
    assert "gold_invalid: column 'answer'" in str(caught.value)
    if kind in ("bool", "broken LaTeX"):
        with pytest.raises(DataError, match="gold of none of the 8 rows"):
            ppo_trainers.trainer(
                "head", tmp_path / "out", data=data, rollout_func=None, reward_funcs=[RuleSet([rule])]
            )


def test_some_unreadable_golds_are_told_with_their_rows(tmp_path, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr("trl_ext.trainers.rows.gold.logger.warning", said.append)
    with pytest.raises(AttributeError, match="generation_config"):
        grpo(tmp_path, rows(values=["1", "it depends", "2", "3"]), rewards=ANSWER, model=Untouched())
    assert "cannot read the gold of 1 of the 4 rows that it was tried on (row 1): gold_invalid" in said[0]


@pytest.mark.parametrize("trainer", ["grpo", "ppo"])
def test_a_streams_unreadable_golds_are_told_before_they_are_answered(trainer, tmp_path, monkeypatch):
    data = rows(values=["it depends"] * 8).to_iterable_dataset()
    options = dict(data=data, reward_funcs=ANSWER, max_steps=1, packing=False, rollout_func=None)
    subject = grpo(tmp_path, data, rewards=ANSWER) if trainer == "grpo" else None
    subject = subject or ppo_trainers.trainer("head", tmp_path, **options)
    monkeypatch.setattr(subject, "_generate", lambda *_: pytest.fail("it was answered"))
    with pytest.raises(DataError, match="The first rows of the stream: rule 'answer' can read the gold of none"):
        subject.train()


def tokenizer(template):
    made = tiny.tokenizer()
    made.chat_template = template
    return made


def grpo(folder, dataset, template=None, rewards=zero, model=None, eval_dataset=None, **changes):
    settings = dict(
        output_dir=str(folder / "out"),
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        max_completion_length=8,
        per_device_train_batch_size=4,
        num_generations=2,
        max_steps=1,
    )
    options = {name: changes.pop(name) for name in ("environment_factory", "rollout_func") if name in changes}
    return GRPOTrainer(
        tiny.model("llama") if model is None else model,
        rewards,
        GRPOConfig(**settings | changes),
        dataset,
        eval_dataset,
        processing_class=tokenizer(template),
        **options,
    )


class Untouched:
    """A model of which nothing but its config may be asked."""

    def __init__(self):
        self.config = tiny.model("llama").config


def test_there_are_forty_kinds():
    assert len(BAD) >= 40


@pytest.mark.parametrize("kind", BAD)
def test_grpo_names_bad_rows_before_the_model_is_touched(kind, tmp_path):
    dataset, sentence, given = BAD[kind]
    template = None if kind == "no chat template" else given.get("template", TEMPLATE)
    with pytest.raises((DataError, ConfigError), match=sentence) as caught:
        grpo(
            tmp_path, texts() if dataset is None else dataset, **{**given, "template": template, "model": Untouched()}
        )
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dataset", [texts("", ""), chats([], None)], ids=["text", "messages"])
def test_an_empty_prompt_is_refused_beside_a_rollout_func_too(dataset, tmp_path):
    with pytest.raises(DataError, match="train_dataset: rows 4, 5 have an empty prompt"):
        grpo(tmp_path, dataset, TEMPLATE, model=Untouched(), rollout_func=rollout)


def test_a_rollout_func_that_gives_a_row_no_prompt_token_is_refused(tmp_path):
    def bare(prompts, trainer):
        made = rollout(prompts, trainer)
        return {**made, "prompt_ids": [[], *made["prompt_ids"][1:]]}

    subject = grpo(tmp_path, texts(), TEMPLATE, rollout_func=bare)
    with pytest.raises(DataError, match="row 0 has no prompt token"):
        subject.train()


@pytest.mark.parametrize("kind", [kind for kind in BAD if kind != "no chat template"])
def test_ppo_names_bad_rows_before_it_trains(kind, tmp_path, monkeypatch):
    dataset, sentence, given = BAD[kind]
    changes = {"reward_funcs" if name == "rewards" else name: value for name, value in given.items()}
    made = tokenizer(changes.pop("template", TEMPLATE))
    monkeypatch.setattr(tiny, "tokenizer", lambda: made)
    dataset = texts() if dataset is None else dataset
    with pytest.raises((DataError, ConfigError), match=sentence):
        ppo_trainers.trainer("head", tmp_path / "out", data=dataset, rollout_func=None, **changes)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("role", ["data", "eval_dataset"])
@pytest.mark.parametrize("kind", BAD_TOKENS)
def test_ppo_names_bad_tokens_before_it_trains(kind, role, tmp_path):
    ids, sentence = BAD_TOKENS[kind]
    dataset = Dataset.from_dict({"input_ids": ids})
    with pytest.raises(DataError, match=sentence):
        ppo_trainers.trainer("head", tmp_path / "out", rollout_func=None, **{role: dataset})


@pytest.mark.parametrize("names", [["a", "c"], ["a", None], None])
def test_a_row_that_names_no_environment_is_refused(names, tmp_path):
    dataset = chats(good=2)
    dataset = dataset.add_column("environment", names) if names else dataset
    factories = {"a": object, "b": object}
    with pytest.raises(DataError, match=r"which of 'a', 'b' answers a row; there is ('c'|None|no such column)"):
        grpo(tmp_path, dataset, TEMPLATE, model=Untouched(), environment_factory=factories)


# Streams ----------------------------------------------------------------------------------------------------------

STREAMS = {
    "null": (stream(None, good=1), "On rank 0 a row came with no prompt"),
    "blank": (stream(" ", good=1), "a blank prompt; its prompt begins ' '"),
    "number": (stream(7, good=1), "a prompt of type int"),
    "half a character": (stream("w5 \ud800", good=1), "a character that is no Unicode"),
    "mixed": (stream([user(GOOD)], good=1), "messages as prompt, where the first row has text"),
    "no chat template": (stream([user(GOOD)], [user(GOOD)]), "messages, and the tokenizer has no chat template"),
}


@pytest.mark.parametrize("kind", STREAMS)
def test_a_streams_rows_are_looked_at_before_they_are_answered(kind, tmp_path, monkeypatch):
    dataset, sentence = STREAMS[kind]
    subject = grpo(tmp_path, dataset, shuffle_dataset=False)
    monkeypatch.setattr(subject, "_generate", lambda *_: pytest.fail("it was answered"))
    with pytest.raises(DataError, match=sentence):
        subject.train()


def test_what_the_code_of_a_stream_raises_is_a_sentence(tmp_path):
    def rows():
        yield from [{"prompt": GOOD}] * 3
        raise RuntimeError("the disk is gone")

    with pytest.raises(DataError, match=r"a row that came along cannot be read: the disk is gone \(RuntimeError\)"):
        grpo(tmp_path, IterableDataset.from_generator(rows)).train()


def test_a_text_beside_a_streams_images_is_refused(tmp_path):
    dataset = IterableDataset.from_generator(lambda: ({"prompt": GOOD, "images": None} for _ in range(9)))
    with pytest.raises(DataError, match="the column 'images', which TRL takes for images, next to text"):
        grpo(tmp_path, dataset).train()


def test_a_column_may_be_called_self(tmp_path):
    grpo(tmp_path, texts().add_column("self", ["w5"] * 4)).train()


def test_a_transforms_rows_are_looked_at_before_they_are_answered(tmp_path):
    dataset = texts().with_transform(lambda rows: {"prompt": ["" for _ in rows["prompt"]]})
    with pytest.raises(DataError, match="On rank 0 a row came with an empty prompt"):
        grpo(tmp_path, dataset).train()


def test_rows_given_to_evaluate_are_looked_at(tmp_path):
    with pytest.raises(DataError, match="eval_dataset: row 4 has a blank prompt"):
        grpo(tmp_path, texts()).evaluate(texts(" "))


# Too few ----------------------------------------------------------------------------------------------------------


def test_fewer_rows_than_one_generation_takes_are_refused(tmp_path):
    with pytest.raises(
        DataError, match="has 4 rows; over 1 process one generation takes 32 prompts, of 2 completions"
    ):
        grpo(tmp_path, texts(), steps_per_generation=16).train()


def test_a_trainer_that_only_evaluates_may_have_few_rows(tmp_path):
    subject = grpo(tmp_path, texts(good=1), eval_dataset=texts(), steps_per_generation=16)
    assert "eval_reward" in subject.evaluate()


# What TRL takes ---------------------------------------------------------------------------------------------------

PARTS = [user([{"type": "text", "text": "w5"}])]
CALLS = List({"role": Value("string"), "content": Value("string"), "tool_calls": List({"name": Value("string")})})
GOOD_ROWS = {
    "duplicates": texts(GOOD, GOOD),
    "a BOS token alone": texts("<bos>"),
    "special tokens beside text": texts("<bos> w5 <eos>"),
    "messages": chats([user("w5", role="system"), user("w6")], [user("w5"), user("w6", role="assistant")]),
    "a system prompt alone": chats([user("w5", role="system")]),
    "an empty system prompt": chats([user("", role="system"), user("w6")]),
    "content in parts": chats(PARTS, PARTS, good=0),
    "content in parts and as text": Dataset.from_dict(
        {"prompt": [PARTS, [user("w5")]]},
        features=Features({"prompt": List({"role": Value("string"), "content": Json()})}),
    ),
    "a tool call instead of content": Dataset.from_dict(
        {
            "prompt": [
                [user("w5", tool_calls=None), {"role": "assistant", "content": None, "tool_calls": [{"name": "w6"}]}]
            ]
        },
        features=Features({"prompt": CALLS}),
    ),
    "columns of any type": texts().add_column("meta", [{"a": [1, None]}] * 4).add_column("completion", ["w5"] * 4),
    "an image instead of text": Dataset.from_dict({"prompt": [[user("")]] * 4, "images": [[b"png"]] * 4}),
    "rows in another order": texts(GOOD).select([4, 2, 0]),
    "tensors": texts().with_format("torch"),
}


@pytest.mark.parametrize("kind", GOOD_ROWS)
def test_what_trl_takes_is_not_refused(kind, tmp_path):
    """An untouchable model: whoever gets that far has passed all checks."""
    with pytest.raises(AttributeError, match="generation_config"):
        grpo(tmp_path, GOOD_ROWS[kind], template=TEMPLATE, model=Untouched())


@pytest.mark.parametrize(("column", "rewards"), [("environments", zero), ("prompts", torch.nn.Linear(1, 1))])
def test_columns_that_nobody_hides_are_fine(column, rewards, tmp_path):
    """TRL hands `environments` on unless there is an environment, and gives reward models text alone."""
    with pytest.raises(AttributeError, match="generation_config"):
        grpo(tmp_path, texts().add_column(column, [1] * 4), rewards=rewards, model=Untouched())


def test_ppo_with_a_reward_model_alone_takes_any_column(tmp_path):
    dataset = texts().add_column("completions", [1] * 4)
    ppo_trainers.trainer("head", tmp_path, data=dataset, rollout_func=None, reward_model=ppo_trainers.classifier())


def test_rows_of_an_environment_may_say_nothing(tmp_path):
    with pytest.raises(AttributeError, match="generation_config"):
        grpo(tmp_path, chats([user("")]), TEMPLATE, model=Untouched(), environment_factory=object)


def test_a_prompt_that_a_rotary_model_may_outgrow_is_told(tmp_path, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr("trl_ext.trainers.rows.rendering.logger.warning", said.append)
    with pytest.raises(AttributeError, match="generation_config"):
        grpo(tmp_path, texts("w5 " * 508), model=Untouched())
    assert "in row 4 the prompt (at most 508 tokens) and max_completion_length=8 together go beyond the 512" in said[0]


def test_some_null_golds_are_told_with_their_rows(tmp_path, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr("trl_ext.trainers.rows.gold.logger.warning", said.append)
    with pytest.raises(AttributeError, match="generation_config"):
        grpo(tmp_path, rows(values=["1", None, "2", None]), rewards=ANSWER, model=Untouched())
    assert "which is null or NaN in 2 of its 4 rows (rows 1, 3)" in said[0]


def test_null_golds_of_rows_that_the_rule_is_not_for_are_fine(tmp_path, monkeypatch):
    monkeypatch.setattr("trl_ext.trainers.rows.gold.logger.warning", pytest.fail)
    dataset = rows(values=["1", None] * 4, kind=["a", "b"] * 4)
    with pytest.raises(AttributeError, match="generation_config"):
        grpo(tmp_path, dataset, rewards=[RuleSet([Answer(when={"kind": "a"}), Call(len)])], model=Untouched())


# The screen -------------------------------------------------------------------------------------------------------


def some_texts(draw):
    return "".join(draw.choices(["w5", " ", "\n", "<eos>", "<bos>", "\0", "\u00a0", "é", ""], k=draw.randrange(4)))


def some_message(draw):
    role = draw.choices(["user", "assistant", " ", None], [8, 8, 1, 1])[0]
    content = draw.choices([some_texts(draw), "w5", None], [4, 8, 1])[0]
    calls = draw.choices([None, [], [{"name": "f"}]], [8, 1, 1])[0]
    return {"role": role, "content": content, "tool_calls": calls}


@pytest.mark.parametrize("form", ["text", "messages"])
@pytest.mark.parametrize("may_be_blank", [False, True])
def test_the_screen_lets_no_bad_row_through(form, may_be_blank):
    draw = random.Random(0)
    make = {
        "text": lambda: draw.choices([some_texts(draw), None], [9, 1])[0],
        "messages": lambda: draw.choices([[some_message(draw) for _ in range(draw.randrange(4))], None], [9, 1])[0],
    }[form]
    values = [make() for _ in range(2000)]
    features = Features({"prompt": Value("string") if form == "text" else CALLS})
    dataset = Dataset.from_dict({"prompt": values}, features=features).select(range(1, 1999))
    check = TextCheck(("<bos>", "<eos>"), "<bos>", may_be_blank)
    bad = [row for row, value in enumerate(values[1:1999]) if check.problem(value, "prompt")]
    flagged = dict(suspects(dataset, "prompt", check))
    assert 100 < len(bad) and set(bad) <= set(flagged)
    assert len(flagged) < 1.2 * len(bad) + 200
    assert all(flagged[row] == values[row + 1] for row in bad)
