"""Forty kinds of bad data for GRPO and PPO: one sentence with row numbers, before a model is touched."""

import datetime
from itertools import product
from unittest.mock import patch

import pyarrow as pa
import pytest
import torch
from datasets import Dataset, Features, IterableDataset, Json, List, Value

from tests import grpo_trainers, ppo_trainers, tiny
from tests.nightly import nightly
from tests.rollouts import rollout
from trl_ext import RuleSet
from trl_ext.errors import ConfigError, DataError
from trl_ext.rewards import Answer, Call, Code, Length, Math

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


class Calm:
    def reset(self, **columns): ...


ANSWER = [RuleSet([Answer()])]
# What the fifth row holds, by what the sentence says of it.
TEXTS = {
    "row 4 has no prompt": [None],
    "row 4 has an empty prompt": [""],
    "row 4 has a blank prompt": [" \n\t", "\u00a0\u3000", "\ufeff\u200b\u00ad\u202e\u2066\x01\u3164"],
    "row 4 has a NUL character in its prompt": ["w5\0w6"],
    "row 4 has a prompt that leaves no room .* 512 tokens": ["w5 " * 600],
}
CHATS = {
    "row 4 has no prompt": [None],
    "row 4 has a prompt without messages": [[]],
    "row 4 has a prompt whose messages are empty": [[user("\u200b")], [user(""), user(" ")]],
    "the role 'wizard', which the chat template does not name": [[user("w5", role="wizard")]],
    "row 4 has a message without role": [[user(GOOD, role=None)], [user(GOOD, role=" ")]],
    "row 4 has a message without content": [[user(GOOD), user(None)]],
    "row 4 has a NUL character": [[user("w5\0")]],
    "row 4 has a prompt that leaves no room": [[user("w5 " * 600)]],
}
# All rows are of this kind.
KINDS = {
    "row 0 has a prompt of type int": 7,
    "row 0 has a prompt of type float": 0.5,
    "row 0 has a prompt of type bool": True,
    "row 0 has a prompt of type bytes": b"w5",
    "row 0 has a prompt of type dict": {"text": "w5"},
    "row 0 has a prompt that is a list of str": ["w5"],
    "row 0 has a prompt that is a list of int": [5, 6],
    "row 0 has a message without role": [{"content": GOOD}],
    "row 0 has a message without content": [{"role": "user"}],
    "whose content is of type int": [user(7)],
    "row 0 has a prompt whose messages are empty": [user([])],
}
WHOLE = {
    "rows 0, 1 have no prompt": texts(None, None, good=0),
    "rows 4, 5, 6 and 1 more have an empty prompt; row 8 has no prompt": texts("", "", "", "", None),
    "the column 'image', which TRL takes for": texts().add_column("image", ["w5"] * 4),
    "the column 'images', which TRL takes": texts().add_column("images", [None] * 4),
    r"train_dataset is a list. Make a dataset of it: datasets.Dataset.from_list": [{"prompt": GOOD}],
    r"is a DataFrame. Make a dataset of it: datasets.Dataset.from_pandas": texts().to_pandas(),
    "train_dataset holds the splits 'train', 'test'. Give a split": {"train": texts(), "test": texts()},
    "row 1 has a prompt of type int": mixed(GOOD, 7),
    "row 1 has messages as prompt, where the first": mixed(GOOD, [user(GOOD)]),
    "row 1 has text as prompt, where the first": mixed([user(GOOD)], GOOD),
    "row 2 has a character that is no Unicode": broken_utf8(),
    "has a column 'prompts', which TRL does not give": texts().add_column("prompts", [1] * 4),
    "'completions', which TRL does not give": texts().add_column("completions", [1] * 4),
    "'trainer_state', which TRL does not give": texts().add_column("trainer_state", [1] * 4),
    "no column 'prompt'": texts().rename_column("prompt", "question"),
    "is empty": texts(good=0),
}
NULL_IN_A = rows(values=[None, "1"] * 4, kind=["a", "b"] * 4)
# Rows, what is given beside them, and the sentence.
BESIDE = [
    (chats(), {"template": None}, "rows 0, 1, 2 and 1 more have messages, and the tokenizer has no chat"),
    (
        chats([user("w5", role="system"), user("w6")]),
        {"template": STRICT},
        "row 4 has messages from system, user. The chat template refuses them: no system role",
    ),
    (
        rows(values=[None] * 8),
        {"rewards": ANSWER},
        "rule 'answer' reads the column 'answer', which is null or NaN in all 8",
    ),
    (rows(values=[float("nan")] * 8), {"rewards": ANSWER}, "in all 8 of its rows"),
    (NULL_IN_A, {"rewards": [RuleSet([Answer(when={"kind": "a"})])]}, "in all 4 of its rows"),
    (
        NULL_IN_A,
        {"rewards": [RuleSet([Length(), Answer(when={"kind": ["B", "c"]})])]},
        "rule 'answer' is for rows whose 'kind' is 'B' or 'c', and no row is; the column holds 'a', 'b'.",
    ),
    (
        texts(),
        {"rewards": [needs_solution]},
        "needs_solution needs the argument 'solution', which is a column for TRL, and train_dataset has 'prompt'",
    ),
    (
        rows("completion", ["1"] * 8),
        {"rewards": [RuleSet([Answer(gold="completion")])]},
        "has a column 'completion', which TRL does not give",
    ),
    (
        rows(values=["1"] * 8),
        {"rewards": ANSWER, "remove_unused_columns": True},
        "remove_unused_columns=True drops the column 'answer'",
    ),
    (
        chats().add_column("environments", ["1"] * 4),
        {"rewards": [RuleSet([Answer(gold="environments")])], "environment_factory": Calm},
        "has a column 'environments', which TRL does not give",
    ),
    (texts(), {"rewards": ANSWER}, "no column 'answer'"),
    (texts(), {"eval_dataset": texts(None, good=1000)}, "eval_dataset: row 1000 has no prompt"),
    (texts(), {"eval_dataset": {"a": texts(), "b": texts("")}}, r"eval_dataset\['b'\]: row 4 has an empty prompt"),
]
BAD = [
    *((texts(value), {}, sentence) for sentence, values in TEXTS.items() for value in values),
    *((chats(value), {}, sentence) for sentence, values in CHATS.items() for value in values),
    *((texts(value, good=0), {}, sentence) for sentence, value in KINDS.items()),
    *((dataset, {}, sentence) for sentence, dataset in WHOLE.items()),
    *BESIDE,
]
BAD_TOKENS = {
    "row 1 has no input_ids": [[[5, 6], None], [[5, 6], []]],
    "row 1 has input_ids outside the 199 tokens": [[[5, 6], [5, -100]], [[5, 6], [5, 199]]],
    "rows 0, 1 have no input_ids": [["w5", "w6"]],
}


def tokenizer(template):
    made = tiny.tokenizer()
    made.chat_template = template
    return made


def grpo(folder, dataset, template=None, rewards=zero, model="llama", **changes):
    settings = dict(max_completion_length=8, num_generations=2, max_steps=1, rollout_func=None) | changes
    settings["processing_class"] = tokenizer(template)
    return grpo_trainers.trainer(folder / "out", model=model, rewards=rewards, data=dataset, **settings)


def ppo(folder, dataset, template=None, rewards=ppo_trainers.reward, **changes):
    made, settings = tokenizer(template), dict(reward_funcs=rewards, rollout_func=None) | changes
    with patch.object(tiny, "tokenizer", lambda: made):
        return ppo_trainers.trainer("head", folder / "out", data=dataset, **settings)


class Untouched:
    """A model of which nothing but its config may be asked."""

    def __init__(self):
        self.config = tiny.model("llama").config


def passes(folder, dataset, **given):
    """Fail unless rows pass all checks: whoever gets as far as the model asks it for what it does not have."""
    with pytest.raises(AttributeError, match="generation_config"):
        grpo(folder, dataset, model=Untouched(), **given)


@pytest.fixture
def said(monkeypatch) -> list[str]:
    """What is warned of golds and of long prompts."""
    texts: list[str] = []
    for module in ("gold", "rendering"):
        monkeypatch.setattr(f"trl_ext.trainers.rows.{module}.logger.warning", texts.append)
    return texts


def test_grpo_names_bad_rows_before_the_model_is_touched(subtests, tmp_path):
    assert len(BAD) >= 40
    for dataset, given, sentence in BAD:
        with subtests.test(sentence):
            with pytest.raises((DataError, ConfigError), match=sentence) as caught:
                grpo(tmp_path, dataset, **{"template": TEMPLATE, "model": Untouched()} | given)
            assert "\n" not in str(caught.value)
            assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("cases", [[BAD[0], BESIDE[1], BESIDE[2], BESIDE[-1]], nightly(BAD)], ids=["some", "all"])
def test_ppo_names_them_before_it_trains(cases, subtests, tmp_path):
    for dataset, given, sentence in cases:
        if "environment_factory" in given:  # an argument of GRPO's alone
            continue
        with subtests.test(sentence):
            with pytest.raises((DataError, ConfigError), match=sentence):
                ppo(tmp_path, dataset, **{"template": TEMPLATE} | given)
            assert not (tmp_path / "out").exists()


def test_ppo_names_bad_tokens_before_it_trains(subtests, tmp_path):
    cases = [(ids, sentence) for sentence, values in BAD_TOKENS.items() for ids in values]
    for (ids, sentence), role in product(cases, ("data", "eval_dataset")):
        given = {"data": Dataset.from_dict({"input_ids": ids})} if role == "data" else {}
        given |= {} if given else {"data": None, "eval_dataset": Dataset.from_dict({"input_ids": ids})}
        with subtests.test(sentence, role=role), pytest.raises(DataError, match=sentence):
            ppo(tmp_path, given.pop("data"), **given)


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


def test_golds_that_no_rule_can_read_are_told_before_the_model_is_touched(subtests, tmp_path):
    for kind, (rule, gold) in UNREADABLE.items():
        data = rows(values=[gold] * 8)
        sentence = rf"'{rule.name}' can read the gold of none of the 8 rows[\s\S]*gold_invalid: column 'answer'"
        with subtests.test(kind), pytest.raises(DataError, match=sentence):
            grpo(tmp_path, data, rewards=[RuleSet([rule, Call(len, isolate=False)])], model=Untouched())
    with pytest.raises(DataError, match="gold of none of the 8 rows"):
        ppo(tmp_path, data, rewards=[RuleSet([rule])])


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


# Streams ----------------------------------------------------------------------------------------------------------

STREAMS = {
    "On rank 0 a row came with no prompt": stream(None, good=1),
    "a blank prompt; its prompt begins ' '": stream(" ", good=1),
    "a prompt of type int": stream(7, good=1),
    "a character that is no Unicode": stream("w5 \ud800", good=1),
    "messages as prompt, where the first row has text": stream([user(GOOD)], good=1),
    "messages, and the tokenizer has no chat template": stream([user(GOOD)], [user(GOOD)]),
}


def test_a_streams_rows_are_looked_at_before_they_are_answered(subtests, tmp_path, monkeypatch):
    for sentence, dataset in STREAMS.items():
        subject = grpo(tmp_path, dataset, shuffle_dataset=False)
        monkeypatch.setattr(subject, "_generate", lambda *_: pytest.fail("it was answered"))
        with subtests.test(sentence), pytest.raises(DataError, match=sentence):
            subject.train()


def test_what_else_comes_along_with_a_stream_or_is_given_later_is_a_sentence(tmp_path):
    images = IterableDataset.from_generator(lambda: ({"prompt": GOOD, "images": None} for _ in range(9)))
    emptied = texts().with_transform(lambda rows: {"prompt": ["" for _ in rows["prompt"]]})
    for dataset, sentence in (
        (images, "the column 'images', which TRL takes for images, next to text"),
        (emptied, "On rank 0 a row came with an empty prompt"),
    ):
        with pytest.raises(DataError, match=sentence):
            grpo(tmp_path, dataset).train()
    with pytest.raises(DataError, match="eval_dataset: row 4 has a blank prompt"):
        grpo(tmp_path, texts()).evaluate(texts(" "))


# Too few ----------------------------------------------------------------------------------------------------------


def test_fewer_rows_than_one_generation_takes_are_refused(tmp_path):
    words = "has 4 rows; over 1 process one generation takes 32 prompts, of 2 completions"
    with pytest.raises(DataError, match=words):
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


def test_what_trl_takes_is_not_refused(subtests, tmp_path):
    for kind, dataset in GOOD_ROWS.items():
        with subtests.test(kind):
            passes(tmp_path, dataset, template=TEMPLATE)
    # TRL hands `environments` on unless there is an environment, and gives reward models text alone.
    passes(tmp_path, texts().add_column("environments", [1] * 4))
    passes(tmp_path, texts().add_column("prompts", [1] * 4), rewards=torch.nn.Linear(1, 1))
    passes(tmp_path, chats([user("")]), template=TEMPLATE, environment_factory=object)  # whose rows may say nothing
    ppo(tmp_path, texts().add_column("completions", [1] * 4), rewards=None, reward_model=ppo_trainers.classifier())


def test_prompts_and_golds_that_may_be_a_mistake_are_told_with_their_rows(tmp_path, said):
    passes(tmp_path, texts("w5 " * 508))
    passes(tmp_path, rows(values=["1", None, "2", None]), rewards=ANSWER)
    passes(tmp_path, rows(values=["1", "it depends", "2", "3"]), rewards=ANSWER)
    for_others = [RuleSet([Answer(when={"kind": "a"}), Call(len)])]
    passes(tmp_path, rows(values=["1", None] * 4, kind=["a", "b"] * 4), rewards=for_others)  # null, and fine
    long, null, unread = said
    assert "in row 4 the prompt (at most 508 tokens) and max_completion_length=8 together go beyond the 512" in long
    assert "which is null or NaN in 2 of its 4 rows (rows 1, 3)" in null
    assert "cannot read the gold of 1 of the 4 rows that it was tried on (row 1): gold_invalid" in unread
