"""Figures that the pages give are those of the committed results, to the last digit that is printed, and pictures show
today's numbers."""

import json
import math
import re
import runpy
import subprocess
import warnings

import pytest

from benchmarks import ages
from benchmarks.story import STORY as STORY_RUNS
from tests.conftest import ROOT

RESULTS = ROOT / "benchmarks" / "results"
README, EVIDENCE = ROOT / "README.md", ROOT / "docs" / "reference" / "evidence" / "tables.md"
SCREEN = ROOT / "docs" / "reference" / "evidence.md"
CHINESE, GRPO = ROOT / "README_zh.md", ROOT / "docs" / "grpo.md"
CHINESE_GRPO = ROOT / "docs" / "zh" / "grpo.md"


def results(name: str) -> list[dict]:
    return json.loads((RESULTS / f"{name}.json").read_text())["results"]


def from_to(values: list[float], word: str = "to", unit: str = "times") -> str:
    return f"{min(values):.2f} {word} {max(values):.2f} {unit}"


def in_chinese(values: list[float]) -> str:
    return from_to(values, "到", "倍")


def grpo_update() -> dict:
    found = results("grpo_update_cpu")
    rows = {f"{one['trl_s']:.1f} s | {one['ours_s']:.1f} s | **{one['ratio']:.2f} times**" for one in found}
    rows |= {f"** | {one['tokens_ratio']:.2f} times |" for one in found}
    ratios = [one["ratio"] for one in found]
    return {
        README: {from_to(ratios)},
        GRPO: {from_to(ratios)},
        CHINESE: {in_chinese(ratios)},
        CHINESE_GRPO: {in_chinese(ratios)},
        EVIDENCE: {from_to(ratios), *rows},
        SCREEN: {f"{from_to(ratios)} as fast"},
    }


def reward() -> dict:
    found = [one for one in results("reward_cpu") if one["pairs_per_step"] == 8]
    by_variant = {
        variant: [one["ratio"] for one in found if one["variant"] == variant]
        for variant in ("packed", "packed, shared")
    }
    rows = {
        f"{packed:.2f} times | **{shared:.2f} times**" for packed, shared in zip(*by_variant.values(), strict=True)
    }
    shared = by_variant["packed, shared"]
    pages = {CHINESE: {in_chinese(shared)}, ROOT / "docs" / "zh" / "reward.md": {in_chinese(shared)}}
    pages |= {SCREEN: {f"{from_to(shared, 'and')} as fast"}}
    return {README: {from_to(shared)}, EVIDENCE: {from_to(shared, "and"), *rows}, **pages}


def ppo() -> dict:
    ours = [one for one in results("ppo_cpu") if not one["variant"].startswith("trl")]
    speed, memory = (from_to([one[key] for one in ours]) for key in ("faster", "smaller"))
    memory_of_grpo = json.loads((RESULTS / "ppo_memory_cpu.json").read_text())["ratio"]
    rows = {f"**{one['faster']:.2f} times** | {one['smaller']:.2f} times smaller" for one in ours}
    chinese = in_chinese([one["faster"] for one in ours])
    everywhere = {speed, memory, f"{memory_of_grpo:.2f} times", *rows}
    screen = {f"{speed} as fast, peak memory {memory} smaller"}
    return {README: {speed, memory}, CHINESE: {chinese}, EVIDENCE: everywhere, SCREEN: screen}


def critic_start() -> dict:
    """Highest explained variance of the first three updates, by seed."""
    best = {
        start: ", ".join(
            f"{max(one['explained_variance'][:3]):.2f}" for one in results("critic_start_cpu") if one["start"] == start
        )
        for start in ("reward", "zero")
    }
    return {EVIDENCE: {f"{best['reward']}; from zero {best['zero']}"}}


def rules() -> dict:
    rates = [one["value"] for one in results("rewards_cpu") if one["unit"].startswith("rows/s")]
    by_name = {one["name"]: one["value"] for one in results("rewards_cpu")}
    repeated, cold = by_name["maths, groups that repeat answers"], by_name["maths, cold"]
    added = by_name["RuleSet over the bare function"]
    page = {f"{min(rates):,.0f} to {max(rates):,.0f} rows/s", f"{repeated:,.0f} and {cold:,.0f} rows/s"}
    return {EVIDENCE: {*page, f"| {max(rates):,.0f} rows/s |", f"| {added:.0f} µs a row |"}}


def reading() -> dict:
    found = json.loads((RESULTS / "reading.json").read_text())
    styles = [one for name, one in found.items() if name.startswith("GSM8K")]
    rows = styles[0]["rows"]
    assert all(one["answer_as_labelled"] == one["math_as_labelled"] == rows for one in styles) and len(styles) == 7
    return {page: {f"{rows:,} of {rows:,} in each"} for page in (EVIDENCE, SCREEN)}


def judges() -> dict:
    plain, one_by_one, failing, _ = (f"{one['seconds']:.2f} s" for one in results("judges_cpu"))
    return {EVIDENCE: {plain}, ROOT / "docs" / "reference" / "judges.md": {plain, one_by_one, failing}}


def ahead_learning() -> dict:
    runs = json.loads((RESULTS / "ahead_learning_cpu.json").read_text())["runs"]
    ahead, waiting = ([f"{one['held_out']:.2f}" for one in runs if one["ahead"] == number] for number in (1, 0))
    page = {f"{', '.join(those[:2])} and {those[2]}" for those in (ahead, waiting)}
    return {EVIDENCE: {f"{', '.join(ahead)}; 0: {', '.join(waiting)}"}, ROOT / "docs" / "running" / "overlap.md": page}


def curriculum() -> dict:
    found = json.loads((RESULTS / "curriculum_cpu.json").read_text())["ratios"]
    middle, low = (
        [found[f'{{"target": {target}}}'][score] for score in ("0.5", "0.6", "0.7")] for target in (0.5, 0.3)
    )
    listed = {"{:.2f}, {:.2f} and {:.2f} times".format(*ratios) for ratios in (middle, low)}
    page = {f"{min(low):.2f} to {max(low):.2f} times", f"{min(middle):.2f} to\n{max(middle):.2f} times"}
    return {EVIDENCE: listed, ROOT / "docs" / "grpo.md": page}


def learning() -> dict:
    """Seconds of the same steps, and held-out answers before and after them."""
    found = json.loads((RESULTS / "learning_cpu.json").read_text())
    ours, trl = found["trl_ext"], found["trl"]
    begin, ours_right, trl_right = (
        f"{100 * right:.0f}" for right in (ours["curve"][0][2], ours["curve"][-1][2], trl["curve"][-1][2])
    )
    ratio = f"{trl['seconds'] / ours['seconds']:.2f}"
    seconds = [f"{one['seconds']:,.0f}" for one in (ours, trl)]
    english = {f"{seconds[0]} s where TRL's trainer takes {seconds[1]} s, {ratio} times as long"}
    english |= {f"from {begin} % to {ours_right} % and {trl_right} %"}
    chinese = {*(f" {one} 秒" for one in seconds), f"{ratio} 倍", f"从 {begin}% 到 {ours_right}% 和 {trl_right}%"}
    evidence = {f"{seconds[0]} s and {seconds[1]} s; from {begin} % to {ours_right} % and {trl_right} %"}
    screen = {f"{seconds[0]} s, TRL {seconds[1]} s", f"from {begin} % to {ours_right} % and {trl_right} %"}
    return {README: english, CHINESE: chinese, EVIDENCE: evidence, SCREEN: screen}


def whole_step() -> dict:
    """The step's ratio, generation in it, next to the update's: wherever a page gives the latter."""
    found = json.loads((RESULTS / "whole_step_cpu.json").read_text())
    (step, update, generate), (step_of_tail, update_of_tail, generate_of_tail) = (
        [f"{found[name]['ratios'][key]:.2f}" for key in ("step", "update", "generate")] for name in ("answers", "tail")
    )
    both = f"{step} times where the update gains {update}"
    tail = f"{step_of_tail} times where the update gains {update_of_tail}"
    rows = {
        f"{step} times faster (asked 4.8); {update} and {generate} times",
        f"{step_of_tail} times faster (asked 5.0); {update_of_tail} and {generate_of_tail} times",
        both.replace("the update", "the\nupdate"),
    }
    screen = {
        f"{step} and {step_of_tail} times as fast as TRL",
        f"({generate} and {generate_of_tail} times)",
    }
    pages = {
        GRPO: {f"gains less ({generate} times)", f"{step} times\nwith an update {update} times"},
        CHINESE: {f"{step} 倍", f"其中更新是 {update} 倍", f"{step_of_tail} 倍", f"其中更新是 {update_of_tail} 倍"},
        CHINESE_GRPO: {f"{generate} 倍", f"含生成的一步是 {step} 倍", f"其中更新是 {update} 倍"},
    }
    readme = {both, tail, f"; {step} times, and {step_of_tail} with a long tail |"}
    return {README: readme, EVIDENCE: rows, SCREEN: screen, **pages}


STORY = ROOT / "docs" / "running" / "story.md"
CHINESE_STORY = ROOT / "docs" / "zh" / "running" / "story.md"


def story() -> dict:
    """Held-out answers before and after each run, and its seconds."""
    found = json.loads((RESULTS / "story_cpu.json").read_text())
    rows = {f"| {100 * run['held_out_after']:.0f} % | {run['seconds']:.0f} s |" for run in found["runs"]}
    last = found["runs"][-1]
    ends = f"from {100 * last['held_out_before']:.0f} % to {100 * last['held_out_after']:.0f} %"
    minutes = f"{found['seconds'] / 60:.0f}"
    in_chinese = {*rows, ends.replace("from ", "从 ").replace(" to ", " 升到 "), f"{minutes} 分钟"}
    return {STORY: {*rows, ends, f"{minutes} minutes"}, CHINESE_STORY: in_chinese, EVIDENCE: {ends}}


def card() -> dict:
    """Of one H100: updates and steps over TRL's, MFU, and how far the formulas are from the allocator."""
    speed = json.loads((RESULTS / "gpu_speed_h100.json").read_text())
    mfu = {one["row"]: f"{one['mfu']:.0%}".replace("%", " %") for one in speed["rows"] if one.get("mfu")}
    faster = speed["summary"]["faster_than"]
    rows = ["update/dualkv", "update/tail", "peers/trl-1.7B"]
    shares = [mfu[f"{row}/trl_ext"] for row in rows]
    updates, steps = ([f"{faster[f'{row}/trl'][what]:.2f}" for row in rows] for what in ("update", "step"))
    listed = {"{}, {} and {}".format(*numbers) for numbers in (updates, steps, shares)}
    ratios = f"{updates[0]} and {updates[1]} times"
    memory = json.loads((RESULTS / "gpu_memory_h100.json").read_text())["rows"]
    ppo, padded = (
        max(abs(one["error_pct"]["allocated"]) for one in memory if one["row"].startswith(trainer))
        for trainer in ("ppo", "reward")
    )
    within = {f"{ppo:.1f} % (PPO) and {padded:.1f} % (reward"}
    errors = [one["error_pct"]["allocated"] for one in (*speed["rows"], *memory)]
    measured = [error for error in errors if error is not None]
    below, above = math.ceil(-min(measured)), math.ceil(max(measured))
    chinese, docs = {f"公式最多比实际分配的显存低 {below}%"}, ROOT / "docs"
    pages = {docs / "memory.md": {f"at most {below} % below what they allocated, and at most {above} % above"}}
    pages |= {docs / "zh" / "memory.md": chinese}
    pages |= {docs / "reference" / "support.md": within, GRPO: {ratios}}
    pages |= {CHINESE_GRPO: {f"{updates[0]} 和 {updates[1]} 倍"}}
    pages |= {CHINESE: chinese}  # the tables of both fill themselves
    pages |= {SCREEN: {f"{ratios} as fast as TRL, MFU {shares[0]} and {shares[1]}", f"at most {below} % below"}}
    return {README: {f"at most {below} % below"}, EVIDENCE: {ratios, *listed}, **pages}


@pytest.mark.parametrize(
    "figures",
    [
        *(card, whole_step, learning, grpo_update, reward, ppo, critic_start, rules, reading, judges, ahead_learning),
        *(curriculum, story),
    ],
    ids=lambda figures: figures.__name__,
)
def test_pages_give_the_figures_of_the_results(figures):
    absent = {
        f"{page.name}: {figure}"
        for page, those in figures().items()
        for figure in those
        if figure not in page.read_text()
    }
    assert not absent


@pytest.mark.parametrize("page", [README, EVIDENCE, SCREEN], ids=lambda page: page.name)
def test_no_page_has_a_figure_of_no_result(page):
    """A line that names times and a file of results holds no ratio that the file lacks."""
    lines = [line for line in page.read_text().splitlines() if "benchmarks/results/" in line and " times" in line]
    for line in lines:
        (name,) = set(re.findall(r"benchmarks/results/(\w+)\.json", line))
        text = (RESULTS / f"{name}.json").read_text()
        known = {f"{float(number):.2f}" for number in re.findall(r"-?\d+\.\d+", text)}
        assert set(re.findall(r"(\d+\.\d\d)(?= | times)", line)) <= known, line


# Pictures ------------------------------------------------------------------------------------------------------------

ASSETS = ROOT / "docs/assets"


@pytest.fixture(scope="module")
def pictures():
    pytest.importorskip("matplotlib")
    return runpy.run_path(str(ASSETS / "pictures.py"))


@pytest.mark.slow  # matplotlib
def test_the_padding_picture_counts_what_the_planner_of_rows_counts(pictures):
    padded, flat = pictures["token_counts"]()
    text = (ASSETS / "padding.svg").read_text()
    assert f"{padded:,} tokens" in text and f"{flat:,} tokens" in text
    assert f"{padded:,} tokens padded, {flat:,} tokens" in (ROOT / "README.md").read_text()


@pytest.mark.slow  # matplotlib
def test_the_memory_picture_shows_the_presets(pictures):
    text = (ASSETS / "memory.svg").read_text()
    for name, preset, obvious, _ in pictures["memory_rows"]():
        assert name in text and f">{preset:.1f}<" in text and f">{obvious:.1f}<" in text


@pytest.mark.slow  # matplotlib
def test_the_family_picture_has_every_method_over_equal_episodes(pictures):
    text = (ASSETS / "family.svg").read_text()
    curves = pictures["family_curves"]()
    assert list(curves) == ["PPO", "REINFORCE++", "RLOO", "GRPO"]
    page = (ROOT / "docs/ppo.md").read_text()
    for method, (episodes, seeds) in curves.items():
        assert f">{method}<" in text and len(seeds) == 3
        assert all(len(curve) == len(episodes) for curve in seeds)
        mean = sum(curve[-1] for curve in seeds) / 3
        assert f"{method} {100 * mean:.1f} %" in page


@pytest.mark.slow  # matplotlib
def test_the_learning_picture_ends_on_the_seconds_of_both(pictures):
    text = (ASSETS / "learning.svg").read_text()
    for name, (seconds, right) in pictures["learning_curves"]().items():
        assert f">{'TRL' if name == 'trl' else name}: {seconds[-1]:,.0f} s<" in text
        assert len(seconds) == len(right) > 2 and seconds[0] == 0


@pytest.mark.slow  # matplotlib
def test_the_step_picture_has_the_seconds_of_each_step(pictures):
    text = (ASSETS / "step.svg").read_text()
    for runs in pictures["step_seconds"]().values():
        assert list(runs) == ["trl", "trl_ext"]
        assert all(f"> {sum(phases.values()):,.1f} s<" in text for phases in runs.values())


def test_each_run_of_the_story_follows_a_sentence_of_the_verdict_before():
    """The page and the picture show it."""
    page, text = STORY.read_text(), (ASSETS / "story.svg").read_text()
    runs = json.loads((RESULTS / "story_cpu.json").read_text())["runs"]
    assert [run["name"] for run in runs] == [attempt.name for attempt in STORY_RUNS]
    for run, attempt in zip(runs, STORY_RUNS, strict=True):
        first = run["headline"] if run is runs[-1] else run["warnings"][0]
        assert attempt.leads_to in first and first[: first.find(". ") + 1 or None] in page
        assert f">{run['name']}<" in text and f"> {100 * run['held_out_after']:.0f} %<" in text


# Ages ----------------------------------------------------------------------------------------------------------------

ON_README = ("gpu_memory_h100", "gpu_speed_h100", "grpo_update_cpu", "learning_cpu", "ppo_cpu", "reward_cpu")
ON_README += ("whole_step_cpu",)


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks/results").glob("*.json")), ids=lambda path: path.stem)
def test_the_page_names_the_commit_of_every_result(path):
    commit = json.loads(path.read_text())["commit"]
    age = f"measured at `{commit.rstrip('+')}`<!-- {path.stem} -->"
    assert f"| `{path.name}` | `{commit}` | {age} |" in EVIDENCE.read_text()
    named = re.findall(rf"measured at `(\w+)`<!-- {path.stem} -->", SCREEN.read_text())
    assert set(named) <= {commit.rstrip("+")}
    assert all((ROOT / "trl_ext" / folder).is_dir() for folder in ages.DEPENDS[path.stem])


def test_every_benchmark_writes_its_figures_with_their_commit():
    """By `machine.write`; what only hands figures to another process is no result."""
    programs = (ROOT / "benchmarks").glob("*.py")
    writes = re.compile(r"(output|memory_of)\.write_text\(json\.dumps|path\.write_text\(json\.dumps\(record")
    assert {path.name for path in programs if writes.search(path.read_text())} == set()


@pytest.mark.parametrize("name", ON_README)
def test_a_figure_on_readme_is_at_most_100_commits_of_its_folders_old(name):
    """An older figure of a card is an expected failure: nothing needs a card to pass."""
    if (commits := ages.age(name)) is None:
        pytest.skip("the history of the repository is absent or shallow")
    old = f"{name} was measured {commits} commits ago: run its benchmark again"
    if commits > ages.MOST_COMMITS and name.endswith("_h100"):
        pytest.xfail(old)
    assert commits <= ages.MOST_COMMITS, old
    if commits > ages.MOST_COMMITS - 15 and not name.endswith("_h100"):
        warnings.warn(f"{old}, before {ages.MOST_COMMITS} commits have passed", stacklevel=1)


def test_the_site_prints_how_many_commits_ago_a_figure_was_measured(monkeypatch):
    commit = ages.measured_commit("learning_cpu")
    line = f"| a | 2026-11-27, measured at `{commit}`<!-- learning_cpu --> |"
    for commits, words in ((12, "measured 12 commits ago"), (1, "measured 1 commit ago")):
        monkeypatch.setattr(ages, "age", lambda name, commits=commits: commits)
        assert ages.on_page_markdown(line, page=None) == f"| a | 2026-11-27, {words} |"
    monkeypatch.setattr(ages, "age", lambda name: None)
    assert ages.on_page_markdown(line) == f"| a | 2026-11-27, measured at `{commit}` |"
    assert "hooks: [benchmarks/ages.py]" in (ROOT / "mkdocs.yml").read_text()


def test_commits_that_changed_a_folder_are_counted(tmp_path, monkeypatch):
    def git(*words):
        subprocess.run(["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *words], check=True)

    (tmp_path / "trl_ext/packing").mkdir(parents=True)
    git("init", "--quiet")
    for number, file in enumerate(["trl_ext/packing/a", "trl_ext/packing/a", "b", "trl_ext/packing/c"]):
        (tmp_path / file).write_text(str(number))
        git("add", ".")
        git("commit", "--quiet", "--message", file)
    monkeypatch.setattr(ages, "ROOT", tmp_path)
    monkeypatch.setattr(ages, "measured_commit", lambda name: "HEAD~3")
    assert ages.age("balance") == 2
    monkeypatch.setattr(ages, "measured_commit", lambda name: "0123456")
    assert ages.age("balance") is None
