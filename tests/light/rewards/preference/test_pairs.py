"""filter_pairs, rule_gaps, and pairs as the page makes them: which are dropped, and what the report says."""

import gzip
import json
import subprocess
import sys

import pytest

from tests.documents import BLOCKS
from tests.rules import rule_class
from trl_ext.errors import ConfigError, DataError
from trl_ext.rewards import Answer, Keywords, RuleSet, filter_pairs
from trl_ext.rewards.pairs import rule_gaps
from trl_ext.rewards.split_pairs import split_implicit

pytestmark = pytest.mark.slow

datasets = pytest.importorskip("datasets")

RIGHT, WRONG = "so A: 18", "so A: 17"
ANSWER = RuleSet([Answer()])


# A tenth of a point for each star in the completion; None where the row's column `broken` is True.
Stars = rule_class("Stars", lambda row: None if row.columns.get("broken") else row.text.count("*") / 10)
AsksTwo = rule_class("AsksTwo", lambda row: float(row.prompt == "two"))
STARS = RuleSet([Stars()])


def dataset(rows: list[dict]) -> datasets.Dataset:
    return datasets.Dataset.from_list(rows)


def samples(*completions, prompt="How many?", **columns) -> datasets.Dataset:
    return dataset([{"prompt": prompt, "completions": list(completions), **columns}])


def pair(chosen: str, rejected: str, answer: str = "18") -> dict:
    return {"prompt": "How many?", "chosen": chosen, "rejected": rejected, "answer": answer}


def says(role: str, content: str | None, **fields) -> dict:
    return {"role": role, "content": content, **fields}


def num_words(text: str) -> int:
    return len(text.split())


def texts(pairs: datasets.Dataset) -> list[tuple[str, str]]:
    return list(zip(pairs["chosen"], pairs["rejected"], strict=True))


def fault_of(chosen, rejected, **columns) -> str | None:
    """The reason for which filter_pairs drops this pair, beside one that is fine; None where it is kept."""
    fine = {"chosen": "Hi yes", "rejected": "Hi no"}
    if isinstance(chosen, list):
        fine = {side: [says("user", "Hi"), says("assistant", text)] for side, text in fine.items()}
    _, report = filter_pairs(dataset([fine | columns, {"chosen": chosen, "rejected": rejected, **columns}]))
    return next((reason for reason, rows in report.first_rows.items() if 1 in rows), None)


@pytest.fixture(scope="module")
def gsm8k(data_dir) -> datasets.Dataset:
    with open(data_dir / "gsm8k_pairs_500q.jsonl", encoding="utf-8") as lines:
        return dataset([json.loads(line) for line in lines])


@pytest.fixture(scope="module")
def hh(data_dir) -> datasets.Dataset:
    with gzip.open(data_dir / "hh_harmless_1800.jsonl.gz", "rt", encoding="utf-8") as lines:
        return dataset([json.loads(line) for line in lines])


@pytest.fixture(scope="module")
def gsm8k_samples(gsm8k) -> datasets.Dataset:
    """Every solution of each question once, one question a row."""
    solutions: dict[tuple[str, str], dict[str, None]] = {}
    for row in gsm8k:
        solutions.setdefault((row["prompt"], row["answer"]), {}).update({row["chosen"]: None, row["rejected"]: None})
    return dataset([{"prompt": q, "answer": a, "completions": list(c)} for (q, a), c in solutions.items()])


def test_a_gap_of_just_the_least_counts_in_spite_of_rounding():
    assert 0.7 - 0.2 < 0.5
    pairs = dataset([pair("*" * 7, "**"), pair("*" * 7, "***")])
    assert texts(filter_pairs(pairs, STARS, min_gap=0.5)[0]) == [("*" * 7, "**")]


# filter_pairs: why a row is dropped

HI, CALL = says("user", "Hi"), [{"name": "clock"}]
A, B = says("assistant", "a"), says("assistant", "b")
WITH_A_PROMPT = (
    *(("yes", "no", None), (" ", "no", "empty"), (None, "no", "empty"), ("yes", "yes ", "identical")),
    *(("yes", "yes, surely", None), ([A], [B], None), ([says("assistant", " ")], [B], "empty")),
    ([B], [B], "identical"),
)
WITH_THE_PROMPT_INSIDE = (
    *(("How many? A: 18", "How many? A: 17", None), ("How many? A: 18", " \n", "empty")),
    *(("How many? A: 18", "How many?\n", "empty"), ("How many? A: 18\n", "How many? A: 18\n", "identical")),
    ("How many? A: 18", "How many? A: 18 ", "identical"),
    ("How many? A: 18", "What time? A: 17", "different_prompt"),
    ("\n\nHuman: a\n\nAssistant: b", "\n\nHuman: a\n\nAssistant: c", None),
    ("\n\nHuman: a\n\nAssistant: ", "\n\nHuman: a\n\nAssistant: c", "empty"),
    ("\n\nHuman: a\n\nAssistant: b", "\n\nHuman: x\n\nAssistant: c", "different_prompt"),
    ("\n\nHuman: a\n\nAssistant: b", "\n\nHuman: a\n\nAssistant: c\n\nHuman: d\n\nAssistant: e", "different_prompt"),
    *(([HI, A], [HI, B], None), ([HI, says("assistant", "")], [HI, B], "empty"), ([HI], [HI, B], "empty")),
    *(([HI, B], [HI, B], "identical"), ([HI, A], [says("user", "Ho"), B], "different_prompt")),
    *(([HI, A, HI, B], [HI, B], "different_prompt"), ([HI, says("assistant", None, tool_calls=CALL)], [HI, B], None)),
    (
        [HI, says("assistant", "", tool_calls=CALL), says("tool", "12"), says("assistant", "12")],
        [HI, says("assistant", "noon")],
        None,
    ),
)


def test_faults_of_pairs(subtests):
    for chosen, rejected, reason in WITH_A_PROMPT:
        prompt = [HI] if isinstance(chosen, list) else "Hi"
        with subtests.test(chosen=chosen, rejected=rejected, prompt=prompt):
            assert fault_of(chosen, rejected, prompt=prompt) == reason
    for chosen, rejected, reason in WITH_THE_PROMPT_INSIDE:
        with subtests.test(chosen=chosen, rejected=rejected):
            assert fault_of(chosen, rejected) == reason


def test_empty_fields_of_messages_do_not_make_a_difference():
    chosen = [says("user", "Hi", name=None), says("assistant", "a", name="x")]
    assert fault_of(chosen, [HI, says("assistant", "b")]) is None


def test_pairs_that_the_rules_contradict_are_dropped_and_with_a_least_gap_undecided_ones():
    data = dataset([pair(RIGHT, WRONG), pair(WRONG, RIGHT), pair(RIGHT, RIGHT + " indeed")])
    pairs, report = filter_pairs(data, ANSWER)
    assert (pairs["rule_gap"][:], report.contradicted) == ([1.0, 0.0], 1)
    assert filter_pairs(data, ANSWER, min_gap=0.5)[1].contradicted == 2


def test_pairs_that_the_rules_cannot_judge_are_kept():
    data = dataset([pair(RIGHT, WRONG, answer="unreadable"), pair(RIGHT, WRONG)])
    pairs, report = filter_pairs(data, ANSWER, min_gap=0.5, margin=True)
    assert (pairs["rule_gap"][:], pairs["margin"][:]) == ([None, 1.0], [0.0, 1.0])
    assert (report.unscored, report.first_rows["unscored"], report.kept) == (1, (0,), 2)
    # A gap column without any value is a column of numbers.
    assert filter_pairs(data.select([0]), ANSWER)[0].features["rule_gap"].dtype == "float64"


def test_without_rules_no_column_is_added():
    assert filter_pairs(dataset([pair(RIGHT, WRONG)]))[0].column_names == ["prompt", "chosen", "rejected", "answer"]


def test_the_filter_report_counts_each_row_once_and_names_three():
    rows = [pair("", WRONG)] * 4 + [
        pair(WRONG, WRONG),
        pair(WRONG, RIGHT),
        pair(RIGHT, WRONG, "?"),
        pair(RIGHT, WRONG),
    ]
    _, report = filter_pairs(dataset(rows), ANSWER)
    assert [int(line.split()[1]) for line in str(report).splitlines()[:-1]] == [8, 2, 4, 1, 0, 1, 1]
    first = {"empty": (0, 1, 2), "identical": (4,), "different_prompt": (), "contradicted": (5,), "unscored": (6,)}
    assert report.first_rows == first and "first_rows" in str(report)


def test_nothing_left_is_an_error_with_the_table():
    with pytest.raises(DataError, match=r"Not one of the 2 pairs is left; most are 'contradicted'.*swapped") as caught:
        filter_pairs(dataset([pair(WRONG, RIGHT)] * 2), ANSWER)
    assert "\ncontradicted             2\n" in str(caught.value)


def test_options_that_cannot_work_are_refused():
    for options in ({"margin": True}, {"min_gap": 0.5}):
        with pytest.raises(ConfigError, match="there are no rules"):
            filter_pairs(dataset([pair(RIGHT, WRONG)]), **options)
    for min_gap in (-1, float("nan")):
        with pytest.raises(ConfigError, match="min_gap is"):
            filter_pairs(dataset([pair(RIGHT, WRONG)]), ANSWER, min_gap=min_gap)
    with pytest.raises(ConfigError, match=r"rules is 'rules.yaml'. Give a RuleSet, such as RuleSet\(\[Answer\(\)\]\)"):
        filter_pairs(dataset([pair(RIGHT, WRONG)]), "rules.yaml")


def test_pairs_of_another_form_are_refused():
    with pytest.raises(DataError, match=r"\(prompt, chosen, rejected\) or \(chosen, rejected\).* are: prompt, chosen"):
        filter_pairs(dataset([{"prompt": "?", "chosen": "a"}]))
    with pytest.raises(DataError, match="'chosen' holds a str and 'rejected' a list"):
        filter_pairs(dataset([{"chosen": "a", "rejected": [says("assistant", "b")]}]))
    pairs = dataset([pair(RIGHT, WRONG)])
    for other in (datasets.DatasetDict({"train": pairs}), pairs.to_list()):
        with pytest.raises(DataError, match=rf"The dataset is a {type(other).__name__}\. .* one split, no stream"):
            filter_pairs(other)
    with pytest.raises(DataError, match=r"The dataset has no rows\. Give at least one row"):
        filter_pairs(pairs.select([]))


# rule_gaps and the split into prompt and completion


IMPLICIT = (
    ("Q?\nso A: 18", "Q?\nso A: 17", "Q?\n", ("so A: 18", "so A: 17")),
    ("It is 18.", "It is 17.", "It is ", ("18.", "17.")),
    ("我有十八", "我有十七", "", ("我有十八", "我有十七")),
    (
        "\n\nHuman: a\n\nAssistant: You may",
        "\n\nHuman: a\n\nAssistant: You must",
        "\n\nHuman: a\n\nAssistant:",
        (" You may", " You must"),
    ),
    ([HI, A, HI, B], [HI, A, HI, A], [HI, A, HI], ([B], [A])),
)


def test_implicit_prompts_are_split_off(subtests):
    for chosen, rejected, prompt, completions in IMPLICIT:
        with subtests.test(chosen=chosen):
            split = split_implicit(chosen, rejected)
            assert (split.prompts, split.completions, split.same_prompt) == ((prompt, prompt), completions, True)


def test_a_gap_is_the_chosen_score_less_the_rejected_one():
    data = dataset([pair(RIGHT, WRONG), pair(WRONG, RIGHT), pair(RIGHT, RIGHT), pair(RIGHT, WRONG, "unreadable")])
    assert rule_gaps(data, ANSWER) == [1.0, -1.0, 0.0, None]
    assert rule_gaps(dataset([{"chosen": "A: 18", "rejected": None, "answer": "18"}]), ANSWER) == [1.0]


def test_all_four_forms_of_a_pair_have_the_same_gap():
    question, right, wrong = says("user", "How many?"), says("assistant", RIGHT), says("assistant", WRONG)
    forms = [
        {"prompt": "How many?\n", "chosen": RIGHT, "rejected": WRONG},
        {"chosen": "How many?\n" + RIGHT, "rejected": "How many?\n" + WRONG},
        {"prompt": [question], "chosen": [right], "rejected": [wrong]},
        {"chosen": [question, right], "rejected": [question, wrong]},
    ]
    assert [rule_gaps(dataset([form | {"answer": 18}]), ANSWER) for form in forms] == [[1.0]] * 4


def test_rules_do_not_see_the_other_side():
    seen: list[set[str]] = []
    looks = rule_class("Looks", lambda row: seen.append(set(row.columns)) or 0.0)
    rule_gaps(dataset([pair(RIGHT, WRONG)]), RuleSet([looks()]))
    assert seen == [{"answer"}] * 2


# Real data


def test_the_answer_rule_agrees_with_every_labelled_solution(gsm8k):
    assert set(rule_gaps(gsm8k, ANSWER)) == {1.0}
    assert filter_pairs(gsm8k, ANSWER)[1].kept == len(gsm8k) == 888


def test_swapped_sides_are_all_contradicted(gsm8k):
    swapped = gsm8k.rename_columns({"chosen": "rejected", "rejected": "chosen"})
    with pytest.raises(DataError, match="swapped"):
        filter_pairs(swapped, ANSWER)


def test_the_broken_rows_of_human_dialogues_are_found(hh):
    pairs, report = filter_pairs(hh)
    assert (report.empty, report.different_prompt, report.kept) == (5, 2, 1793)
    assert (report.first_rows["empty"], report.first_rows["different_prompt"]) == ((86, 516, 925), (1254, 1688))
    assert (len(pairs), pairs.column_names) == (1793, ["chosen", "rejected"])


def test_human_dialogues_are_split_before_the_last_reply(hh):
    splits = [split_implicit(row["chosen"], row["rejected"]) for row in filter_pairs(hh)[0]]
    assert all(prompt.endswith("\n\nAssistant:") for split in splits for prompt in split.prompts)
    assert not any("\n\nAssistant:" in completion for split in splits for completion in split.completions)


def test_rules_that_contradict_people_drop_their_rows(hh):
    pairs, report = filter_pairs(hh, RuleSet([Keywords(forbidden=("illegal", "drug"))]))
    assert (report.contradicted, report.kept, len(pairs)) == (37, 1756, 1756)
    assert min(pairs["rule_gap"]) == 0.0


def test_pairs_as_the_page_makes_them_match_in_length(gsm8k_samples):
    (text,) = (block.text for block in BLOCKS if block.page == "docs/reward.md" and "def pair_of" in block.text)
    space = {"samples": gsm8k_samples}
    exec(
        text.partition("samples = ")[0] + "rules = " + text.partition("rules = ")[2].partition("\ntrainer = ")[0],
        space,
    )
    sides = texts(space["pairs"])
    assert len(sides) > 250 and set(rule_gaps(space["pairs"], ANSWER)) == {1.0}
    chosen, rejected = (sum(len(two[side]) for two in sides) / len(sides) for side in (0, 1))
    assert abs(chosen / rejected - 1) < 0.03


# The package


def test_filtering_needs_neither_torch_nor_trl():
    code = (
        "import sys; from datasets import Dataset; from trl_ext.rewards import Answer, RuleSet, filter_pairs;"
        "data = Dataset.from_list([{'prompt': '?', 'chosen': 'A: 18', 'rejected': 'A: 17', 'answer': '18'}]);"
        "filter_pairs(data, RuleSet([Answer()]));"
        "print([m for m in ('torch', 'trl', 'transformers') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_scorers_may_yield_their_totals():
    def totals(prompts, completions, **columns):
        yield from (float(completion == RIGHT) for completion in completions)

    kept, _ = filter_pairs(dataset([pair(RIGHT, WRONG), pair(WRONG, RIGHT)]), totals)
    assert len(kept) == 1
