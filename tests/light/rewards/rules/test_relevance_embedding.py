"""Relevance by embeddings: of a server, which may fail, refuse or lie, and of a small model on this machine."""

import json

import pytest

from tests.chat_server import ChatServer
from trl_ext.errors import RuleError
from trl_ext.rewards.rule import Row
from trl_ext.rewards.rules import embeddings
from trl_ext.rewards.rules.relevance import Relevance

PROMPT = "Why do volcanoes erupt?"
SYNONYM = "Because molten rock rises under pressure."
OTHER = "Because yeast makes gas in dough."
MEANINGS = {"volcanoes": (1.0, 0.0), "molten": (1.0, 0.1), "yeast": (0.0, 1.0)}


def vector_of(text: str) -> list[float]:
    return next((list(vector) for word, vector in MEANINGS.items() if word in text), [0.0, 0.0])


def honest(request: dict) -> bytes:
    entries = [{"index": place, "embedding": vector_of(text)} for place, text in enumerate(request["input"])]
    return json.dumps({"data": entries[::-1]}).encode()


@pytest.fixture(scope="module")
def running():
    pytest.importorskip("openai")
    with ChatServer() as server:
        yield server


@pytest.fixture
def server(running):
    return running.answers(honest)


def judged(server, *completions: str, **fields):
    rule = Relevance(model="m", base_url=server.url, **fields)
    return rule.score_batch([Row(PROMPT, text, None, {}) for text in completions])


def test_a_synonym_is_about_the_subject_and_another_one_is_not(server):
    verdicts = judged(server, SYNONYM, OTHER, SYNONYM)
    assert [verdict.value for verdict in verdicts] == [1.0, 0.0, 1.0]
    assert [request["input"] for request in server.requests] == [[PROMPT, SYNONYM, OTHER]]
    assert server.headers[0]["Authorization"] == "Bearer none"
    assert Relevance().score(Row(PROMPT, SYNONYM, None, {})).value == 0.0


def test_a_copied_prompt_earns_nothing_though_nothing_is_more_similar(server):
    asked = "Please explain at length why volcanoes erupt and why magma rises."
    rule = Relevance(model="m", base_url=server.url)
    assert rule.score(Row(asked, asked, None, {})).value == 0.0
    assert rule.score(Row(asked, f"{asked} Interesting question indeed!", None, {})).value == 0.0


def test_a_completion_that_the_server_refuses_costs_its_own_row_alone(server):
    server.answers(lambda request: 400 if OTHER in request["input"] else honest(request))
    verdicts = judged(server, SYNONYM, OTHER)
    assert [(verdict.value, verdict.status) for verdict in verdicts] == [(1.0, "ok"), (0.0, "refused")]


@pytest.mark.parametrize(
    "answer",
    [
        401,
        {},
        {"data": []},
        {"data": [{"index": 0, "embedding": [1.0]}]},
        {"data": [{"index": 0, "embedding": [1.0]}, {"index": 1, "embedding": [1.0, 2.0]}]},
        {"data": [{"index": 0, "embedding": [1.0]}, {"index": 1, "embedding": [float("nan")]}]},
        {"data": [{"index": 0, "embedding": ["x"]}, {"index": 1, "embedding": [1.0]}]},
    ],
)
def test_a_server_that_fails_or_lies_leaves_the_row_without_a_value(server, answer):
    server.answers(lambda request: answer if isinstance(answer, int) else json.dumps(answer).encode())
    [verdict] = judged(server, SYNONYM)
    assert (verdict.value, verdict.status) == (None, "infra_error")


def test_a_long_text_is_judged_by_its_head(server):
    judged(server, SYNONYM + " and" * 10_000)
    assert max(map(len, server.requests[0]["input"])) == 8_000


def test_a_blank_completion_is_not_sent(server):
    assert judged(server, "")[0].status == "no_answer"
    assert server.requests == []


def test_the_key_comes_from_the_environment(server, monkeypatch):
    monkeypatch.setenv("MY_KEY", "s3cret")
    judged(server, SYNONYM, api_key_env="MY_KEY")
    assert server.headers[0]["Authorization"] == "Bearer s3cret"
    assert "s3cret" not in repr(Relevance(model="m", base_url="http://a/v1", api_key_env="MY_KEY"))


@pytest.mark.parametrize(
    "fields",
    [
        {"base_url": "http://a/v1"},
        {"model": "m", "base_url": "ftp://a"},
        {"model": "m", "api_key_env": "MY_KEY"},
        {"model": "m", "timeout_s": 0},
        {"model": 3},
    ],
)
def test_fields_that_cannot_work_are_refused(fields):
    with pytest.raises(RuleError, match="relevance"):
        Relevance(**fields)


def test_a_small_model_runs_here(tmp_path):
    model2vec = pytest.importorskip("model2vec")
    import numpy as np
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"[UNK]": 0, "[PAD]": 1, "volcanoes": 2, "molten": 3, "yeast": 4}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    numbers = np.array([[0, 0], [0, 0], [1, 0], [1, 0.1], [0, 1]], dtype=np.float32)
    model2vec.StaticModel(numbers, tokenizer).save_pretrained(tmp_path)
    rows = [Row(PROMPT, text, None, {}) for text in (SYNONYM, OTHER)]
    values = [verdict.value for verdict in Relevance(model=str(tmp_path)).score_batch(rows)]
    assert values[0] == 1.0 and values[1] < 0.01
    embeddings.local_model.cache_clear()
