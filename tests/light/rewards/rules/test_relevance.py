"""Relevance: mentions of what the prompt asks, less what is copied from it."""

# ruff: noqa: RUF001  Letters and marks that look alike are the subject.

from trl_ext.rewards.rule import Row, Verdict
from trl_ext.rewards.rules.relevance import Relevance, read_prompt
from trl_ext.rewards.text.prompt import question_text

PROMPT = "Explain in two sentences why volcanoes erupt and what magma chambers have to do with it."
ANSWER = "Magma collects in chambers under the crust. When its pressure grows too high, volcanoes erupt."
CHINESE = "请用两句话解释火山为什么会喷发，岩浆房起什么作用？"


def judged(prompt: object, text: str, **fields) -> Verdict:
    return Relevance(**fields).score(Row(prompt, text, None, {}))


def test_an_answer_about_the_subject_earns_more_than_one_about_another():
    other = "Bread rises because yeast makes gas, and the oven sets the dough."
    assert judged(PROMPT, ANSWER).value > 0.8
    assert judged(PROMPT, other).value == 0.0


def test_chinese_is_compared_by_pairs_of_characters():
    assert judged(CHINESE, "岩浆房里压力升高时，火山就会喷发出熔岩和气体。").value > 0.4
    assert judged(CHINESE, "面包因为酵母产生气体而膨胀。").value == 0.0


def test_a_copied_prompt_earns_the_floor(subtests):
    for prompt in (PROMPT, CHINESE, [{"role": "user", "content": PROMPT}]):
        for shape in ("{}", "{0} {0}", "Sure, here is something: {}", "{} Interesting question indeed!"):
            with subtests.test(shape, prompt=prompt):
                assert judged(prompt, shape.format(question_text(prompt))).value == 0.0


def test_the_prompts_words_alone_earn_the_floor(subtests):
    for text in ("magma volcanoes erupt chambers", "erupt " * 50, "why it is what it is", "", "\u200b"):
        with subtests.test(text):
            assert (judged(PROMPT, text).value, judged(PROMPT, text).status) == (0.0, "no_answer")


def test_more_mentions_of_a_word_earn_no_more_and_what_the_prompt_repeats_weighs_less():
    assert judged(PROMPT, "Magma rises.").value == judged(PROMPT, "Magma magma magma magma rises.").value
    weights = read_prompt("magma magma magma volcano").weights
    assert weights["magma"] < weights["volcano"]


def test_the_value_grows_up_to_enough():
    own = "Hot molten rock rises and breaks through:"
    values = [
        judged(PROMPT, f"{own} {words}", enough=1.0).value
        for words in ("magma", "magma, volcanoes", "magma, volcanoes erupt")
    ]
    assert values == sorted(set(values)) and values[-1] < 1.0
    assert judged(PROMPT, f"{own} magma, volcanoes erupt", enough=values[-1]).value == 1.0


def test_the_prompts_words_in_another_order_need_as_many_words_of_ones_own():
    shuffled = "Volcanoes magma chambers erupt sentences explain"
    values = [
        judged(PROMPT, f"{shuffled} {own}").value
        for own in ("indeed", "hot rock", "hot rock rises through some crust")
    ]
    assert values == sorted(set(values)) and values[0] < 0.2


def test_quoting_part_of_the_prompt_costs_its_share():
    quoting = f"You ask why volcanoes erupt and what magma chambers do. {ANSWER}"
    assert 0.0 < judged(PROMPT, quoting).value < judged(PROMPT, ANSWER).value


def test_a_prompt_without_content_cannot_be_judged(subtests):
    for prompt in (None, "", "?!", "What is it?", [], [{"role": "system", "content": "volcanoes"}]):
        with subtests.test(prompt=prompt):
            assert judged(prompt, ANSWER).status == "gold_invalid"


def test_of_a_conversation_the_last_user_message_counts():
    prompt = [
        {"role": "user", "content": "Tell me of bread."},
        {"role": "assistant", "content": "Yeast."},
        {"role": "user", "content": [{"type": "text", "text": PROMPT}]},
    ]
    assert judged(prompt, ANSWER) == judged(PROMPT, ANSWER)
