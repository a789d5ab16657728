"""What two files of records say about the same tests."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

# Why a test passes with TRL's classes and not with ours, by its name without parameters.
HEAD = "by design: a LoraConfig without task_type trains the score head too, where TRL leaves a random one frozen"
DECIDED = {
    "test_train_dense_with_peft_config": HEAD,
    "test_train_with_peft_config_and_gradient_checkpointing": HEAD,
    "test_train_with_unknown_environment_raises": "by design: it is refused before training starts",
    "test_train_model_dtype": "by design: float16 weights round an optimizer step on a processor away",
    "test_generate_rollout_func_raises_when_required_keys_are_missing": "the test makes a trainer without __init__",
    "test_warning_raised_all_rewards_none": "by design: a run whose rewards score nothing in its first step ends",
    "test_train_with_generation_kwargs": "by design: a setting of the config is set there, not in generation_kwargs",
}
MEASURED = ("runtime", "per_second", "step_time", "phase/", "packing/", "total_flos")
CLOSE = 1e-3


def ended(records: Path) -> dict[str, dict]:
    """The last line of each test that has ended."""
    lines = map(json.loads, records.read_text().splitlines())
    return {line["test"]: line for line in lines if "outcome" in line}


def values(line: dict) -> Iterator[tuple[tuple, float]]:
    """Each logged number but times, with its trainer, entry and key."""
    for i, history in enumerate(line.get("logs", ())):
        for j, entry in enumerate(history):
            for key, value in entry.items():
                if isinstance(value, (int, float)) and not any(part in key for part in MEASURED):
                    yield (i, j, key), float(value)


def difference(stock: dict, own: dict) -> float:
    """The largest relative difference of a value that both logged; below 1e-4, against 1e-4."""
    a, b = dict(values(stock)), dict(values(own))
    return max((abs(a[k] - b[k]) / max(abs(a[k]), abs(b[k]), 1e-4) for k in a.keys() & b.keys()), default=0.0)


def short(test: str) -> str:
    return test.split("::")[-1].split("[")[0]


def report(stock_file: Path, own_file: Path) -> int:
    """Print how the two runs compare; return 1 if a test differs for no reason that `DECIDED` gives."""
    stock, own = ended(stock_file), ended(own_file)
    both = [test for test in stock if test in own]
    for (first, second), number in sorted(Counter((stock[t]["outcome"], own[t]["outcome"]) for t in both).items()):
        print(f"{number:4} {first} with TRL's classes, {second} with ours")
    passed = [test for test in both if stock[test]["outcome"] == own[test]["outcome"] == "passed"]
    trained = [test for test in passed if own[test].get("packs")]
    packed = [test for test in trained if all(own[test]["packs"])]
    close = [test for test in trained if difference(stock[test], own[test]) <= CLOSE]
    print(f"{len(trained)} passed with a trainer of ours: {len(packed)} packed, {len(trained) - len(packed)} padded")
    print(f"{len(close)} of them logged TRL's values within {CLOSE}")
    differ = [test for test in both if (stock[test]["outcome"] == "passed") != (own[test]["outcome"] == "passed")]
    for test in differ:
        ours = own[test]["outcome"] == "passed"
        why = "passes with ours only" if ours else DECIDED.get(short(test), "not decided")
        last = (stock if ours else own)[test]["message"].strip().splitlines()[-1:]
        print(f"{test}: {why}: {''.join(last)[:300]}")
    return int(any(own[t]["outcome"] != "passed" and short(t) not in DECIDED for t in differ) or not both)
