"""build_pairs, filter_pairs, rule_gaps: which pairs are made, which are dropped, and what the reports say."""

import gzip
import json
import subprocess
import sys

import pytest

import trl_ext
from tests.rules import rule_class
from trl_ext.errors import ConfigError, DataError, RuleError
from trl_ext.rewards import Answer, Keywords, Length, RuleSet, build_pairs, filter_pairs
from trl_ext.rewards.preference.data import CHUNK_ROWS, falls_short
from trl_ext.rewards.preference.gaps import rule_gaps, split_implicit

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


# build_pairs: what a pair is


def test_a_pair_is_a_better_and_a_worse_sample_of_one_prompt():
    pairs, _ = build_pairs(samples(WRONG, RIGHT, answer="18"), ANSWER)
    scores = {"chosen_score": 1.0, "rejected_score": 0.0, "rule_gap": 1.0}
    assert pairs.to_list() == [{"prompt": "How many?", "chosen": RIGHT, "rejected": WRONG, **scores, "answer": "18"}]


def test_the_margin_is_the_gap():
    pairs, _ = build_pairs(samples("**", "--"), STARS, min_gap=0.1, margin=True)
    assert pairs["margin"][:] == pairs["rule_gap"][:] == [0.2]


def test_a_gap_of_just_the_least_counts_in_spite_of_rounding():
    assert 0.7 - 0.2 < 0.5
    assert not falls_short(0.7 - 0.2, 0.5)
    assert falls_short(0.49, 0.5)


# Samples, options, pairs made; number of blank samples, of candidates too close in score, and too unlike in length.
CHOICES = {
    "a gap below the least": (("***", "*--", "---"), {"min_gap": 0.15}, [("***", "---")], (0, 1, 0)),
    "ties": (("*-", "-*", "--"), {"min_gap": 0.0}, [("*-", "--")], (0, 1, 0)),
    "lengths too unlike": (("*" * 12, "-" * 8, "-" * 7), {"max_length_ratio": 1.5}, [("*" * 12, "-" * 8)], (0, 1, 1)),
    "length in words": (("* " * 8, "-" * 12, "- " * 7), {"length": num_words}, [("* " * 8, "- " * 7)], (0, 1, 1)),
    "the closest lengths first, each sample once": (
        *(("*" * 10, "-" * 14, "-" * 11, "*" * 13), {"max_pairs_per_prompt": 4}),
        *([("*" * 13, "-" * 14), ("*" * 10, "-" * 11)], (0, 2, 0)),
    ),
    "at equal lengths the larger gap, then the earlier sample": (
        *(("**--", "****", "----", "-  -"), {"min_gap": 0.1}, [("****", "----"), ("**--", "-  -")], (0, 1, 0)),
    ),
    "blank samples": (("   ", "***", "---", None), {"min_gap": 0.1}, [("***", "---")], (2, 0, 0)),
}


def test_which_samples_make_pairs(subtests):
    for fact, (completions, options, made, counts) in CHOICES.items():
        with subtests.test(fact):
            pairs, report = build_pairs(samples(*completions), STARS, **options)
            assert texts(pairs) == made
            assert (report.num_blank, report.num_too_close, report.num_too_unlike) == counts


def test_a_prompt_makes_at_most_so_many_pairs_and_two_texts_one():
    data = samples("*-", "-*", "* ", "--", "- ", " -")
    found = [build_pairs(data, STARS, min_gap=0.1, max_pairs_per_prompt=most)[1].num_pairs for most in (1, 2, 9)]
    assert found == [1, 2, 3]
    assert build_pairs(samples(RIGHT, RIGHT, WRONG, WRONG, answer="18"), ANSWER)[1].num_pairs == 1


def test_samples_without_a_score_take_no_part():
    cells = (("a", "unreadable"), ("b", "18"))
    data = dataset([{"prompt": p, "completions": [RIGHT, WRONG], "answer": answer} for p, answer in cells])
    pairs, report = build_pairs(data, ANSWER)
    assert pairs["prompt"][:] == ["b"]
    assert (report.num_unscored, report.num_prompts_without_pair) == (2, 1)


def test_every_sample_is_scored_with_its_own_row():
    numbers = range(10, CHUNK_ROWS + 50)
    data = dataset([{"prompt": f"{n}", "completions": [f"A: {n}", f"A: {n + 1}"], "answer": n} for n in numbers])
    pairs, report = build_pairs(data, ANSWER)
    assert report.num_pairs == len(data)
    assert all(row["chosen"] == f"A: {row['prompt']}" for row in pairs)


def test_the_rules_see_the_prompt():
    data = dataset([{"prompt": prompt, "completions": ["***", "---"]} for prompt in ("one", "two")])
    pairs, _ = build_pairs(data, RuleSet([Stars(), AsksTwo()]), min_gap=0.1)
    assert pairs["chosen_score"][:] == pytest.approx([0.3, 1.3])


# build_pairs: forms of data


def test_messages_stay_messages():
    right, wrong = [says("assistant", RIGHT)], [says("assistant", WRONG)]
    question = [says("user", "How many?")]
    pairs, _ = build_pairs(samples(wrong, right, prompt=question, answer="18"), ANSWER)
    assert (pairs[0]["prompt"], pairs[0]["chosen"], pairs[0]["rejected"]) == (question, right, wrong)


@pytest.mark.parametrize("prompt", ["How many?", [says("user", "How many?")]])
def test_one_sample_a_row_is_grouped_by_prompt(prompt):
    other = "Other?" if isinstance(prompt, str) else [says("user", "Other?")]
    rows = [
        {"prompt": prompt, "completion": RIGHT, "answer": "18", "sample": 0},
        {"prompt": other, "completion": WRONG, "answer": "18", "sample": 1},
        {"prompt": prompt, "completion": WRONG, "answer": "18", "sample": 2},
    ]
    pairs, report = build_pairs(dataset(rows), ANSWER)
    assert (texts(pairs), pairs["sample"][:]) == ([(RIGHT, WRONG)], [0])
    assert (report.num_prompts, report.num_prompts_without_pair) == (2, 1)


def test_the_column_of_samples_can_have_another_name_and_a_format():
    data = samples(RIGHT, WRONG, answer=18).rename_column("completions", "generations").with_format("numpy")
    assert texts(build_pairs(data, ANSWER, completions="generations")[0]) == [(RIGHT, WRONG)]


def test_other_columns_keep_their_types():
    data = samples(RIGHT, WRONG, answer="18", level=1).cast_column("level", datasets.ClassLabel(names=["low", "high"]))
    pairs, _ = build_pairs(data, ANSWER)
    assert pairs.features["level"] == data.features["level"]


# build_pairs: report and errors


def test_the_report_counts_samples_and_candidates():
    data = dataset(
        [
            {"prompt": "a", "completions": ["*" * 10, "-" * 8, "-" * 4, " "], "broken": False},
            {"prompt": "b", "completions": ["***", "---"], "broken": True},
        ]
    )
    _, report = build_pairs(data, STARS)
    assert [int(line.split()[1]) for line in str(report).splitlines()[:-2]] == [2, 6, 2, 1, 1, 1, 1, 1]
    assert (report.mean_chosen_length, report.mean_rejected_length) == (10.0, 8.0)


def test_no_pair_at_all_is_an_error_that_says_why(subtests):
    for completions, words in (
        (["*****", "-"], "1 too unlike in length. Raise max_length_ratio"),
        (["*", "-"], "1 are too close in score and 0 too unlike in length. Lower min_gap"),
        (["*****"], "Give at least two samples per prompt"),
        ([" ", ""], "2 are blank"),
    ):
        with subtests.test(completions=completions):
            with pytest.raises(DataError, match="Not a single pair came out of 1 prompts") as caught:
                build_pairs(samples(*completions), STARS)
            assert words in str(caught.value)


def test_a_limit_that_cannot_work_is_named(subtests):
    for key, values in {
        "min_gap": (-0.1, float("nan"), "0.5"),
        "max_length_ratio": (0.9, float("inf")),
        "max_pairs_per_prompt": (0, 1.5),
    }.items():
        for value in values:
            with subtests.test(key, value=value), pytest.raises(ConfigError, match=f"{key} is .* Give a"):
                build_pairs(samples(RIGHT, WRONG, answer="18"), ANSWER, **{key: value})


def test_data_and_rules_that_cannot_work_are_refused(subtests):
    def one_in(cell):
        return dataset([{"prompt": "?", "completions": cell}])

    good = samples(RIGHT, WRONG, answer="18")
    columns = r"\(prompt, completions\) or \(prompt, completion\).* are: question, answer"
    for data, rules, error, match in (
        (dataset([{"question": "?", "answer": "18"}]), ANSWER, DataError, columns),
        (samples(RIGHT, WRONG, answer="18", chosen="x"), ANSWER, DataError, "already has the columns chosen"),
        (one_in("one text"), STARS, DataError, "Row 0 holds a single sample in 'completions'"),
        (one_in([says("assistant", "one")]), STARS, DataError, "Row 0 holds a single sample in 'completions'"),
        (good.to_list(), ANSWER, DataError, "is a list. Give a datasets.Dataset"),
        (datasets.DatasetDict(train=good), ANSWER, DataError, "is a DatasetDict. Give a datasets.Dataset"),
        (good.select([]), ANSWER, DataError, "has no rows"),
        (samples(RIGHT, WRONG), [Answer()], ConfigError, "Give a RuleSet"),
        (samples(RIGHT, WRONG), ANSWER, DataError, "reads the column 'answer'"),
        (samples(RIGHT, WRONG), RuleSet([Length()]), RuleError, r"While scoring rows 0 to 0 of the .*completion_ids"),
    ):
        with subtests.test(match), pytest.raises(error, match=match):
            build_pairs(data, rules)
    with pytest.raises(ConfigError, match="length gave a list"):
        build_pairs(samples("***", "---"), STARS, length=str.split)


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


def test_filtering_what_was_built_changes_nothing():
    built, _ = build_pairs(samples(WRONG, RIGHT, answer="18"), ANSWER, margin=True)
    again, _ = filter_pairs(built, ANSWER, margin=True)
    assert again.to_list() == built.to_list()


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


def test_pairs_of_another_form_are_refused():
    with pytest.raises(DataError, match=r"\(prompt, chosen, rejected\) or \(chosen, rejected\).* are: prompt, chosen"):
        filter_pairs(dataset([{"prompt": "?", "chosen": "a"}]))
    with pytest.raises(DataError, match="'chosen' holds a str and 'rejected' a list"):
        filter_pairs(dataset([{"chosen": "a", "rejected": [says("assistant", "b")]}]))


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


def test_pairs_of_real_solutions_match_in_length(gsm8k_samples):
    pairs, report = build_pairs(gsm8k_samples, ANSWER)
    assert (report.num_prompts, report.num_samples, report.num_pairs) == (267, 1066, 282)
    assert set(pairs["rule_gap"]) == {1.0}
    assert all(max(sides) <= 1.5 * min(sides) for sides in [(len(c), len(r)) for c, r in texts(pairs)])
    assert abs(report.mean_chosen_length / report.mean_rejected_length - 1) < 0.02


def test_both_forms_of_samples_make_the_same_pairs(gsm8k_samples):
    single = dataset(
        [
            {"prompt": row["prompt"], "answer": row["answer"], "completion": completion}
            for row in gsm8k_samples
            for completion in row["completions"]
        ]
    )
    listed, one_by_one = build_pairs(gsm8k_samples, ANSWER), build_pairs(single, ANSWER)
    assert (listed[0].to_list(), listed[1]) == (one_by_one[0].to_list(), one_by_one[1])


# The package


def test_both_are_public():
    assert (trl_ext.build_pairs, trl_ext.filter_pairs) == (build_pairs, filter_pairs)


def test_making_pairs_needs_neither_torch_nor_trl():
    code = (
        "import sys; from datasets import Dataset; from trl_ext.rewards import Answer, RuleSet, build_pairs;"
        "data = Dataset.from_list([{'prompt': '?', 'completions': ['A: 18', 'A: 17'], 'answer': '18'}]);"
        "build_pairs(data, RuleSet([Answer()]));"
        "print([m for m in ('torch', 'trl', 'transformers') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
