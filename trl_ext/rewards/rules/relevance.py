"""Judge whether the completion adds text about the prompt, by sentence embeddings.

The prompt's words are removed from the completion first: a copy of them would be more similar than any answer. The
rest is compared with the prompt and with sentences that say nothing, because a promise, a question or a denial that
names the subject's words is as similar to the prompt as an answer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any

import regex

from trl_ext.errors import RuleError, SupportError
from trl_ext.rewards.base.rule import Row, Rule, Verdict, check_choice, check_number
from trl_ext.rewards.text.prose import UNSPACED, normalized, prose, text_part, words
from trl_ext.rewards.text.task import question_text

_RUN = regex.compile(rf"[{UNSPACED}]+|[^\W_{UNSPACED}]+")
_UNIT = regex.compile(rf"[{UNSPACED}]|[^\W_{UNSPACED}]+")
# Of normalized text, in which full-width marks are ASCII: a question mark may come between two Chinese characters.
_SENTENCE_END = regex.compile(rf"(?<=[.!?])\s+|(?<=[!?])(?=[{UNSPACED}])|(?<=\u3002)|\n+")
_QUESTION = regex.compile(r"(?s)\A.*\?\W*\Z")
_SEPARATOR = regex.compile(r"[,;:/|\u3001]|\b(?:and|or)\b")
_SHORT_ITEMS = regex.compile(r"(?<!w)ww?(?:,++ww?){2,}(?!w)")  # three or more, where w is a word
# 100 words, or characters of a script without spaces: models read some 128 to 512 tokens and ignore the rest.
_PART = regex.compile(rf"(?:\s*+(?:[{UNSPACED}]|[^\s{UNSPACED}]++)){{1,100}}+")
_PART_OF_LINE = regex.compile(rf"(?:[^\S\n]*+(?:[{UNSPACED}]|[^\s{UNSPACED}]++)){{1,100}}+")
_MOST_PARTS = 100

# Sentences that say nothing. They need not be the completion's words or language: the model compares meanings.
EMPTY_SENTENCES = (
    "This answer covers every aspect of the topic in detail.",
    "I will explain everything about it below.",
    "There is a lot to say about this subject.",
    "I love talking about this.",
    "Would you like to know more about this?",
    "Please tell me which one you mean.",
    "It depends on what you want.",
    "This has nothing to do with it.",
    "That is not the reason.",
    "Everyone has a different opinion about it.",
    "Experts agree that this is very important.",
    "People often talk about it.",
    "It is known to everybody.",
    "It is a matter of many different things.",
    "This and that are part of it.",
    "First comes this, and then comes that.",
)
# Similarity to the prompt minus that to the nearest empty sentence: means that earn nothing and everything. Chosen on
# one half of AlpacaEval's prompts; `benchmarks/prose_frames.py` measures on the other half and on later prompts.
_NO_MARGIN, _FULL_MARGIN = -0.15, 0.1


@dataclass(frozen=True, slots=True)
class Relevance(Rule):
    """Similarity of the prompt and the completion's new words, less that of sentences which say nothing.

        value = min(1, max(0, cosine) / enough) * min(1, own / shared) * content

    `own` counts the completion's words that the prompt lacks, `shared` the other words; scripts without spaces are
    compared by pairs of characters. `cosine` is the similarity of the prompt and the new words, a mean over parts of
    100. A completion without new words, such as a copy of the prompt, earns 0.0 with status `no_answer`.

    `content`, 0 to 1, grows with a sentence's similarity to the prompt less that to the nearest of `EMPTY_SENTENCES`,
    a mean over the new words. Words in questions, and in lists of three or more items of up to two words, add nothing.

    The value depends on the row alone: not on other rows of its batch, on other processes, or on training or
    evaluation.

    A row whose prompt has no words has no value (`gold_invalid`). In a conversation only the last user message is
    compared. Code, LaTeX, links and tags are left out.

    Args:
        model: Name or folder of a sentence-transformers model. The default reads English.
        enough: Cosine, above 0 and up to 1, that earns the full value.
        where: "all" reads the whole completion, "after_think" the text after the last `</think>`.
        device: Device of the model: "cpu", "cuda".

    Raises:
        SupportError: sentence-transformers is not installed, or the model cannot be loaded.
        RuleError: The process that scores cannot use the device, unlike the process that built the rule.

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
        found = [self._read(row) for row in rows]
        texts = dict.fromkeys(chain(EMPTY_SENTENCES, *(one.texts for one in found if isinstance(one, _Asked))))
        encoded = self._encoded([*texts])
        vectors, empty = dict(zip(texts, encoded, strict=True)), encoded[: len(EMPTY_SENTENCES)]
        return [one if isinstance(one, Verdict) else self._verdict(one, vectors, empty) for one in found]

    def _encoded(self, texts: list[str]) -> Any:
        """Return the texts' vectors of length 1; a RuleError ends the run if this process cannot use the device."""
        try:
            return encoder(self.model, self.device).encode(texts, normalize_embeddings=True, show_progress_bar=False)
        except Exception as error:
            if self.device == "cpu":
                raise
            failed = f"the model {self.model!r} does not compute on {self.device!r} in this process ({error!r:.300})"
            advice = "Set device: cpu where AsyncGRPOTrainer scores, in a process that sees no card"
            raise RuleError(f"Rule '{self.name}': {failed}. {advice}.") from error

    def _read(self, row: Row) -> "Verdict | _Asked":
        """Return the texts to embed, or a verdict where none is needed."""
        prompt = plain(question_text(row.prompt))
        if not _RUN.search(prompt):
            return Verdict(None, "gold_invalid", "the prompt has no words")
        own, num_shared = without_copied(plain(prose(text_part(row.text, self.where))), prompt)
        parts, num_own = _PART.findall(own), len(_UNIT.findall(own))
        if not num_own:
            return Verdict(self.floor, "no_answer", "no words beyond the prompt's")
        if len(parts) > _MOST_PARTS:
            return Verdict(self.floor, "too_long", f"{num_own} words, at most {100 * _MOST_PARTS} are read")
        sentences = filter(_UNIT.search, _PART_OF_LINE.findall(_SENTENCE_END.sub("\n", own)))
        return _Asked(prompt, parts, list(sentences), num_own, num_own / max(num_shared, 1))

    def _verdict(self, asked: "_Asked", vectors: Mapping[str, Any], empty: Any) -> Verdict:
        """Return the verdict by each text's vector of length 1, and the vectors of `EMPTY_SENTENCES` as rows."""
        prompt = vectors[asked.prompt]
        cosine = sum(float(vectors[part] @ prompt) for part in asked.parts) / len(asked.parts)
        margin = 0.0
        for sentence in asked.sentences:
            nearest = float((empty @ vectors[sentence]).max())
            margin += num_said(sentence) * (float(vectors[sentence] @ prompt) - nearest - _NO_MARGIN)
        content = min(1.0, max(0.0, margin / asked.num_own) / (_FULL_MARGIN - _NO_MARGIN))
        # Rounded, because a text's embedding depends a little on the other texts in its batch.
        value = round(min(1.0, max(0.0, cosine) / self.enough) * min(1.0, asked.ratio) * content, 3)
        detail = f"cosine {cosine:.2f}, {asked.ratio:.1f} own words per shared one, content {content:.2f}"
        return Verdict(value, "ok", detail)


@dataclass(frozen=True, slots=True)
class _Asked:
    """The texts of a row that have to be embedded.

    Args:
        parts: The completion's `num_own` new words, in parts of 100.
        sentences: The same words by sentence.
        ratio: New words per word that the prompt has, too.
    """

    prompt: str
    parts: list[str]
    sentences: list[str]
    num_own: int
    ratio: float

    @property
    def texts(self) -> list[str]:
        return [self.prompt, *self.parts, *self.sentences]


def num_said(sentence: str) -> int:
    """Return the number of words outside of lists: three or more items of up to two words. A question has none.

    Example:
        >>> num_said("It needs lava, hot magma, gas and rock, which rises slowly.")
        7
    """
    said = _QUESTION.sub("", sentence)
    shape = regex.sub("[^w,]", "", _UNIT.sub("w", _SEPARATOR.sub(",", said)))  # www,ww,w,w,www
    num_listed = "".join(_SHORT_ITEMS.findall(shape)).count("w")
    return len(_UNIT.findall(said)) - num_listed


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
