"""Judge whether the completion adds text about the prompt, by sentence embeddings.

The prompt's words are removed from the completion first: a copy of them would be more similar than any answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import regex

from trl_ext.errors import SupportError
from trl_ext.rewards.base.rule import Row, Rule, Verdict, check_choice, check_number
from trl_ext.rewards.text.prose import UNSPACED, normalized, prose, text_part, words
from trl_ext.rewards.text.task import question_text

_RUN = regex.compile(rf"[{UNSPACED}]+|[^\W_{UNSPACED}]+")
_UNIT = regex.compile(rf"[{UNSPACED}]|[^\W_{UNSPACED}]+")
# 100 words, or characters of a script without spaces: models read some 128 to 512 tokens and ignore the rest.
_PART = regex.compile(rf"(?:\s*+(?:[{UNSPACED}]|[^\s{UNSPACED}]++)){{1,100}}+")
_MOST_PARTS = 100


@dataclass(frozen=True, slots=True)
class Relevance(Rule):
    """Similarity of the prompt and the completion's new words.

        value = min(1, max(0, cosine) / enough) * min(1, own / shared)

    `own` counts the completion's words that the prompt lacks, `shared` the other words; scripts without spaces are
    compared by pairs of characters. `cosine` is the similarity of the prompt and the new words, a mean over parts of
    100. A completion without new words, such as a copy of the prompt, earns 0.0 with status `no_answer`.

    A row whose prompt has no words has no value (`gold_invalid`). In a conversation only the last user message is
    compared. Code, LaTeX, links and tags are left out.

    Args:
        model: Name or folder of a sentence-transformers model. The default reads English.
        enough: Cosine, above 0 and up to 1, that earns the full value.
        where: "all" reads the whole completion, "after_think" the text after the last `</think>`.
        device: Device of the model: "cpu", "cuda".

    Raises:
        SupportError: sentence-transformers is not installed, or the model cannot be loaded.

    Example:
        `RuleSet([Relevance("sentence-transformers/paraphrase-multilingual-MiniLM-L12-v2", weight=0.5)])`
    """

    model: str = "sentence-transformers/all-MiniLM-L6-v2"
    enough: float = 0.4
    where: str = "all"
    device: str = "cpu"

    def check(self) -> None:
        check_choice(self, "where", self.where, ("all", "after_think"))
        check_number(self, "enough", self.enough, "a cosine above 0, up to 1", lambda cosine: 0 < cosine <= 1)
        try:
            encoder(self.model, self.device)
        except Exception as error:  # no package, no such model, no such device
            said = f"the model {self.model!r} cannot be loaded on {self.device!r} ({error!r:.300})"
            run = f"pip install 'trl_ext[relevance]' && hf download {self.model}"
            raise SupportError(f"Rule '{self.name}': {said}. Run: {run}, or give a folder.") from error

    def score_batch(self, rows: Sequence[Row]) -> list[Verdict]:
        found: list[Verdict | tuple[str, list[str], float]] = [self._read(row) for row in rows]
        asked = [one for one in found if not isinstance(one, Verdict)]
        texts = list(dict.fromkeys(text for prompt, parts, _ in asked for text in (prompt, *parts)))
        settings = {"normalize_embeddings": True, "show_progress_bar": False}
        encoded = encoder(self.model, self.device).encode(texts, **settings) if texts else []
        vectors = dict(zip(texts, encoded, strict=True))
        return [one if isinstance(one, Verdict) else self._verdict(*one, vectors) for one in found]

    def _read(self, row: Row) -> Verdict | tuple[str, list[str], float]:
        """Return the prompt, the parts of the completion's new words, and new words per shared word; or a verdict."""
        prompt = plain(question_text(row.prompt))
        if not _RUN.search(prompt):
            return Verdict(None, "gold_invalid", "the prompt has no words")
        own, num_shared = without_copied(plain(prose(text_part(row.text, self.where))), prompt)
        parts, num_own = _PART.findall(own), len(_UNIT.findall(own))
        if not num_own:
            return Verdict(self.floor, "no_answer", "no words beyond the prompt's")
        if len(parts) > _MOST_PARTS:
            return Verdict(self.floor, "too_long", f"{num_own} words, at most {100 * _MOST_PARTS} are read")
        return prompt, parts, num_own / max(num_shared, 1)

    def _verdict(self, prompt: str, parts: list[str], ratio: float, vectors: dict[str, Any]) -> Verdict:
        cosine = sum(float(vectors[part] @ vectors[prompt]) for part in parts) / len(parts)
        # Rounded, because a text's embedding depends a little on the other texts in its batch.
        value = round(min(1.0, max(0.0, cosine) / self.enough) * min(1.0, ratio), 3)
        return Verdict(value, "ok", f"cosine {cosine:.2f}, {ratio:.1f} own words per shared one")


def plain(text: str) -> str:
    """Return a normalized text without lone surrogates, which tokenizers refuse."""
    return normalized(text).encode("utf-8", "replace").decode()


def without_copied(text: str, prompt: str) -> tuple[str, int]:
    """Return a text without the prompt's words and their plurals, and the number of removed words.

    Example:
        >>> without_copied("Leap years: a leap is a pancake", "Why do we have a leap year?")
        (' :   is  pancake', 5)
    """
    known = {unit for run in _RUN.findall(prompt.casefold()) for unit in units_of(run)}

    def own(match: Any) -> str:
        is_known = [unit in known for unit in units_of(match.group().casefold())]
        if len(is_known) == 1:
            return "" if is_known[0] else match.group()
        around = zip(match.group(), [False, *is_known], [*is_known, False], strict=False)
        return "".join(char for char, before, after in around if not (before or after))

    left = _RUN.sub(own, text)
    return left, len(_UNIT.findall(text)) - len(_UNIT.findall(left))


def units_of(run: str) -> list[str]:
    """Return a word without a plural's s, or the pairs of characters in a script without spaces."""
    return [run.rstrip("s")] if len(words(run)) == 1 else [run[at : at + 2] for at in range(len(run) - 1)]


@lru_cache(maxsize=4)
def encoder(model: str, device: str) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(model, device=device)
