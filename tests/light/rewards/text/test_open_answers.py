"""Answers to open questions: what a careful reader accepts is paid, lists and denials are not."""

import pytest

from trl_ext.errors import RuleError
from trl_ext.rewards import Answer, Row, RuleSet

CAPITAL = "What is the capital of France?"
OLDER = "Who is older, Ann Lee or Bob Ray?"


def verdict_of(text: str, gold: object, question: str = CAPITAL, **fields: str):
    return Answer(kind="qa", **fields).score(Row(question, text, None, {"answer": gold}))


@pytest.mark.parametrize(
    ("gold", "texts"),
    [
        (
            ["Paris", "City of Light"],
            (
                *("Paris", "paris.", "**Paris**", "Paris, France", "the city of Paris", r"\boxed{Paris}"),
                *("<answer>Paris</answer>", "The answer is Paris.", "Not Lyon but Paris.", "The City of Light."),
                *("Paris is the capital of France, not Lyon.", "The capital is Paris. London is England's."),
                "<think>London? Rome?</think>Paris, of course. It lies on the Seine.",
                "As an AI model, I cannot browse. The capital of France is Paris.",
            ),
        ),
        ("5 March 2024", ("It was on March 5, 2024.", "March 5th, 2024")),
        ("1979-80 season", ("In the 1979\u201380 season",)),
        ("Wilhelm Conrad R\u00f6ntgen", ("Wilhelm Rontgen won it in 1901.",)),
        ("twelve", ("There were 12 of them.",)),
        ("1,000,000", ("It is 1000000.",)),
        ("Brazil, Colombia and Ecuador", ("Ecuador, Brazil and Colombia.",)),
        ("hit points or health points", ("It stands for Hit Points.",)),
        ("no", ("No, it is round.", "no")),
        ({"value": "J. K. Rowling", "aliases": ["Joanne Rowling"]}, ("It is by J.K. Rowling.", "Joanne Rowling")),
        ("not guilty", ("not guilty",)),
        ("bee keepers", ("He was a bee keeper.",)),
        ("\u5317\u4eac", ("\u7b54\u6848\u662f\u5317\u4eac\u3002",)),
    ],
)
def test_an_accepted_answer_is_paid(gold, texts, subtests):
    for text in texts:
        with subtests.test(text=text):
            assert verdict_of(text, gold).value == 1.0


@pytest.mark.parametrize(
    ("gold", "question", "texts"),
    [
        (
            ["Paris", "City of Paris"],
            CAPITAL,
            (
                # several
                *("Paris, London, Rome, Madrid.", "The capital is Paris, London, or Rome.", "Paris or London"),
                *("It is either Paris or London.", "Paris / London / Rome", "London, Paris", "London and Paris"),
                *("- Paris\n- London\n- Rome", "1. Paris\n2. London", "Paris; London; Rome", "Paris vs London"),
                *("paris, london, rome, madrid", "paris london rome madrid berlin", "Paris & London", "Paris|Rome"),
                *("Candidates: Lyon, Marseille, Paris, Nice.", r"\boxed{Paris}\boxed{London}", "Paris and London"),
                "Some say Paris, others say London, others Rome.",
                "It could be Paris, it could be London, it could be Rome.",
                "The capital of France is Paris, the capital of France is London.",
                # a second guess, behind another sentence or hidden
                *("London. Paris.", "It is London. It is Paris.", "<answer>London</answer> Paris"),
                *("The answer is London. Or Paris.", "<think>Paris</think>I do not know.", "Lyon <!-- Paris -->"),
                # denied
                *("It is not Paris.", "It isn't Paris.", "Paris is not the capital of France.", "Never Paris."),
                *("I don't think it is Paris.", "Anything but Paris", "Neither Paris nor Lyon.", "Paris is wrong."),
                *("Rather than Paris, it is Lyon.", "It is Lyon instead of Paris.", "Paris? No.", "Except Paris"),
                "The capital of France is London, which is bigger than Paris.",
                *("", "<answer></answer>"),
            ),
        ),
        ("no", "Is it flat?", ("Yes, no.", "There is no doubt: yes.")),
        ("Ann Lee", OLDER, ("Bob Ray is older than Ann Lee.", "Ann Lee or Bob Ray.", "Ann Lee and Bob Ray")),
        ("7", "How many moons?", ("1 2 3 4 5 6 7 8 9", "5, 6, 7, 8", "7 or 8", "17", "7.5", "It is 7k")),
        ("flat", "is the earth flat", ("Is the earth flat", "is the Earth flat.")),
        ("Bob Ray", OLDER, ("Ann Lee is older, Bob Ray is younger.",)),
        ("5 March 2024", "When?", ("5 or 6 March 2024", "March 2024", "3 May 2024")),
        ("Ann Smith", "Who wrote it?", ("Ann Miller and John Smith", "Ann Lee, who met Smith")),
        ("heart", "Which organ?", ("heart, lungs and liver", "heart or liver")),
    ],
)
def test_a_hedge_a_denial_and_a_part_earn_nothing(gold, question, texts, subtests):
    for text in texts:
        with subtests.test(text=text):
            assert verdict_of(text, gold, question).value == 0.0


def test_one_sentence_is_read_whatever_the_golds_are():
    guesses = "It is cancer. It is Stroke."
    assert verdict_of(guesses, ["Cancer", "cancer"]).value == 1.0
    assert verdict_of(guesses, ["Stroke", "stroke"]).value == verdict_of(guesses, "stroke").value == 0.0


def test_statuses_tell_why():
    statuses = {text: verdict_of(text, "Paris").status for text in ("Lyon", "Paris or Lyon", "It is not Paris.", "")}
    assert statuses == {"Lyon": "ok", "Paris or Lyon": "conflict", "It is not Paris.": "no_answer", "": "no_answer"}
    assert verdict_of("Paris lies in " + "x" * 900, "Paris").status == "too_long"
    assert verdict_of("Paris", {"aliases": None}).status == "gold_invalid"


def test_exact_and_f1_are_those_of_squad():
    golds = ["the Eiffel Tower", "La tour Eiffel"]
    assert verdict_of("The answer is Eiffel tower.", golds, match="exact").value == 1.0
    assert verdict_of("It is the Eiffel Tower", golds, match="exact").value == 0.0
    assert verdict_of("It is the Eiffel Tower", golds, match="f1").value == pytest.approx(2 * 2 / (4 + 2))


def test_match_without_effect_is_refused():
    with pytest.raises(RuleError, match="match is for kind: qa"):
        Answer(match="f1")
    with pytest.raises(RuleError, match="match is 'fuzzy'"):
        Answer(kind="qa", match="fuzzy")


def test_a_list_column_in_yaml_is_judged_through_a_rule_set(tmp_path):
    file = tmp_path / "rules.yaml"
    file.write_text("rules:\n  - {rule: answer, kind: qa, gold: aliases}\n", encoding="utf-8")
    rules = RuleSet.from_yaml(file)
    prompts = [[{"role": "user", "content": CAPITAL}]] * 2
    completions = [[{"role": "assistant", "content": text}] for text in ("It is Paris.", "Paris or Rome")]
    assert rules(prompts=prompts, completions=completions, aliases=[["Paris", "Lutetia"]] * 2) == [1.0, 0.0]
    rules.close()
