"""Relevance: how similar what the completion adds is to the prompt."""

# ruff: noqa: RUF001  Letters and marks that look alike are the subject.

import pickle

import pytest

from tests.embeddings import encoder as encoder
from trl_ext.errors import ConfigError, RuleError
from trl_ext.rewards import RuleSet
from trl_ext.rewards.base.rule import Row, Verdict
from trl_ext.rewards.rules import relevance as module
from trl_ext.rewards.rules.relevance import Relevance
from trl_ext.rewards.text.task import question_text

PROMPT = "Explain in two sentences why volcanoes erupt and what magma chambers have to do with it."
ANSWER = "Pressure grows in the rock under the crust, and gas drives lava out."
OTHER = "The oven sets the dough, while yeast makes it grow."
CHINESE = "请用两句话解释火山为什么会喷发，岩浆房起什么作用？"

pytestmark = pytest.mark.usefixtures("encoder")


def judged(prompt: object, text: str, **fields) -> Verdict:
    return Relevance(**fields).score(Row(prompt, text, None, {}))


def test_an_answer_in_other_words_earns_more_than_one_about_another_subject():
    assert judged(PROMPT, ANSWER).value > 0.8
    assert judged(PROMPT, OTHER).value < 0.3


def test_the_prompts_words_earn_nothing_whatever_their_order(subtests):
    for prompt in (PROMPT, CHINESE, [{"role": "user", "content": PROMPT}]):
        text = question_text(prompt)
        for copy in (text, f"{text} {text}", " ".join(reversed(text.split())), text.upper(), "", "\u200b", "`lava`"):
            with subtests.test(copy, prompt=prompt):
                assert (judged(prompt, copy).value, judged(prompt, copy).status) == (0.0, "no_answer")


def test_a_copy_with_a_word_added_earns_next_to_nothing_and_a_quotation_costs_nothing():
    assert judged(PROMPT, f"{PROMPT} lava").value < 0.1
    assert judged(PROMPT, f"Why do volcanoes erupt? {ANSWER}").value == judged(PROMPT, ANSWER).value


def test_a_salad_of_the_prompts_words_is_judged_by_the_others(subtests):
    salads = {
        PROMPT: "Volcanoes erupt the soup, magma votes, chambers explain a Tuesday.",
        CHINESE: "火山喷发投票给窗户。",
    }
    for prompt, salad in salads.items():
        with subtests.test(salad):
            assert judged(prompt, salad).value < 0.5
    assert judged(CHINESE, "熔岩从裂缝里涌出。").value > judged(CHINESE, "烤面包需要酵母。").value


def test_the_whole_of_a_long_text_counts():
    padded = f"{ANSWER} " * 10 + f"{OTHER} " * 90
    assert judged(PROMPT, padded).value < 0.5 * judged(PROMPT, ANSWER).value
    assert judged(PROMPT, "lava flows " * 6000).status == "too_long"


def test_a_prompt_without_words_cannot_be_judged(subtests):
    for prompt in (None, "", "?!", [], [{"role": "system", "content": "volcanoes"}]):
        with subtests.test(prompt=prompt):
            assert judged(prompt, ANSWER) == Verdict(None, "gold_invalid", "the prompt has no words")


def test_a_batch_is_encoded_at_once_and_judged_as_its_rows_alone(encoder, monkeypatch):
    asked, encode = [], encoder.encode
    monkeypatch.setattr(encoder, "encode", lambda texts, **kw: asked.append(len(texts)) or encode(texts, **kw))
    texts = [ANSWER, OTHER, PROMPT, ANSWER]
    rules = RuleSet([Relevance()])
    values = rules(prompts=[PROMPT] * 4, completions=texts)
    assert asked == [3 + len(module.EMPTY_SENTENCES)]  # the prompt and two different texts
    assert values == [judged(PROMPT, text).value for text in texts]


def test_a_text_without_content_earns_little_though_it_names_the_subject(subtests):
    prompt = "Why do volcanoes erupt, and where is magma kept?"  # A prompt's "to do with it" would be taken out.
    for text in (
        "This answer covers every aspect of lava, crust and pressure.",
        "Do you know lava? Would you like me to explain the pressure?",
        "It has nothing to do with lava.",
        "Lava, rock, hot gas, crust, pressure.",
    ):
        with subtests.test(text):
            assert judged(prompt, text).value < 0.65 * judged(prompt, ANSWER).value


def test_a_question_in_chinese_ends_at_its_mark(subtests):
    answer = "熔岩从裂缝里涌出。"
    assert judged(CHINESE, answer).value == 1.0
    for mark in "?？":
        with subtests.test(mark):
            assert judged(CHINESE, f"熔岩{mark}" * 30).value == 0.0
            assert 0.0 < judged(CHINESE, f"熔岩{mark}" * 30 + answer).value < 1.0


def test_an_answer_with_a_list_in_it_is_paid_for_the_rest():
    assert judged(PROMPT, f"{ANSWER} It brings ash, dust, gas and rock. {ANSWER}").value > 0.8


def test_a_value_does_not_depend_on_the_other_rows_of_its_batch():
    rules = RuleSet([Relevance()])
    alone = rules(prompts=[PROMPT], completions=[ANSWER])
    others = ["How is bread baked?", CHINESE, "What do you know?"]
    assert rules(prompts=[PROMPT, *others], completions=[ANSWER, OTHER, ANSWER, OTHER])[:1] == alone


@pytest.mark.parametrize("fails_in", ["loading", "encoding"])  # in a spawned process, in a forked process
def test_a_process_without_the_device_ends_the_run_with_advice(monkeypatch, fails_in):
    class Forked:
        def encode(self, texts, **settings):
            raise RuntimeError("No CUDA GPUs are available")

    def missing(model, device):
        return Forked() if fails_in == "encoding" else Forked().encode([])

    rules = pickle.loads(pickle.dumps(RuleSet([Relevance(device="cuda")])))
    monkeypatch.setattr(module, "encoder", missing)
    with pytest.raises(RuleError, match=r"'cuda' in this process.*No CUDA GPUs are available.*Set device: cpu"):
        rules(prompts=[PROMPT], completions=[ANSWER])


def test_on_a_processor_a_failure_to_encode_costs_its_row_alone(monkeypatch):
    rules = RuleSet([Relevance()])
    monkeypatch.setattr(module, "encoder", lambda model, device: object())
    (explained,) = rules.explain_all([PROMPT], [ANSWER])
    assert (explained.parts[0].value, explained.parts[0].status) == (0.0, "error")


def test_without_the_package_or_the_model_it_is_not_built(monkeypatch):
    def missing(model, device):
        raise OSError("no such model")

    monkeypatch.setattr(module, "encoder", missing)
    with pytest.raises(ConfigError, match=r"'my/model' cannot be loaded.*no such model.*pip install.*hf download my/"):
        RuleSet.from_dict({"rules": [{"rule": "relevance", "model": "my/model"}]})
