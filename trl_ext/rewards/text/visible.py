"""Cut thoughts, comments and the attributes of tags from a completion."""

import re

_COMMENT = re.compile(r"<!--.*?(?:-->|\Z)", re.DOTALL)
_COMMENT_LINE = re.compile(r"^[ \t]{0,9}%.{0,9999}$", re.MULTILINE)  # of LaTeX
_CALCULATOR = re.compile(r"<<[^<>\n]{0,200}>>")  # GSM8K's notes: <<48/2=24>>24
# A quoted value may hold ">" but not "<", so that no search continues into the next tag.
_ATTRIBUTES = re.compile(r"""<(/?[A-Za-z][\w-]*+)\s(?>(?:"[^"<]*+"|'[^'<]*+'|[^<>])*)>""")


def after_think(text: str) -> str:
    """Return the text after the last `</think>`: all of it without think tags, "" while `<think>` is open."""
    _, closer, after = text.rpartition("</think>")
    if closer:
        return after
    return "" if "<think>" in text else after


def visible(text: str, where: str) -> str:
    """Return the text to search for an answer, without comments, GSM8K's notes and the attributes of tags.

    Args:
        where: "all", or "after_think" for the text after the thoughts; that is "" while thoughts are open.

    Example:
        >>> visible('<think>43</think><answer value="42"></answer><!-- 42 -->', "after_think")
        '<answer></answer>'
    """
    if where != "all" and "think>" in text:
        rest = after_think(text)
        text = "" if "<think>" in rest or text.count("<think>") > text.count("</think>") else rest
    if "<" in text:
        text = _ATTRIBUTES.sub(r"<\1>", _COMMENT.sub("", _CALCULATOR.sub("", text)))
    return _COMMENT_LINE.sub("", text) if "%" in text else text
