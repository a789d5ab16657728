"""Words in any script: where a word ends, and which scripts write without spaces."""

import re

# Han, kana, Hangul, Thai to Myanmar, Khmer and full-width forms: scripts without spaces between words, or (Hangul)
# with particles written onto the word, so that a keyword's end is not visible in the text.
_UNSPACED = (
    "\u0e00-\u109f\u1100-\u11ff\u1780-\u17ff\u3005-\u30ff\u3130-\u318f\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
    "\uf900-\ufaff\uff66-\uff9f"
)
_ONE_UNSPACED = re.compile(f"[{_UNSPACED}]")
_WORD = re.compile(rf"[{_UNSPACED}]|[^\s{_UNSPACED}]+")


def words(text: str) -> list[str]:
    """Words between spaces; in scripts without spaces each character is a word.

    Example:
        >>> words("use GPT 做数学")
        ['use', 'GPT', '做', '数', '学']
    """
    return text.split() if text.isascii() else _WORD.findall(text)


def contains_word(text: str, word: str) -> bool:
    """Whether `word` occurs in `text` as a word of its own.

    Example:
        >>> contains_word("a cathedral", "cat"), contains_word("my cat.", "cat"), contains_word("我喜欢数学", "数学")
        (False, True, True)
    """
    start = text.find(word)
    while start >= 0:
        end = start + len(word)
        if not _joined(text[start - 1 : start], word[0]) and not _joined(word[-1], text[end : end + 1]):
            return True
        start = text.find(word, start + 1)
    return False


def _joined(left: str, right: str) -> bool:
    """Whether two neighbours (either may be empty) are inside one word."""
    return _in_spaced_word(left) and _in_spaced_word(right)


def _in_spaced_word(char: str) -> bool:
    return (char.isalnum() or char == "_") and not _ONE_UNSPACED.match(char)
