r"""Tables of spellings: signs and commands of one meaning; text that is a word, a function or a unit."""

import re
from collections.abc import Callable

from trl_ext.rewards.text.prose import HALF_WIDTH

WORDS = '"'  # Opens a token that holds words.

_TEXT = "text|textbf|textit|textrm|textnormal|textup|mathrm|mathbf|mathit|mathsf|mbox|operatorname|boldsymbol|bm"
TOKEN = re.compile(
    rf"\\(?:{_TEXT})\s*\{{(?P<text>[^{{}}$]*)\}}"
    r"|\\(?:begin|end)\s*\{[A-Za-z*]+\}|\\mathbb\s*(?:\{[A-Z]\}|[A-Z])"
    r"|\\[A-Za-z]+|\\."
    r"|[0-9]+(?:\.[0-9]+|\.(?=[/*)]))?(?:[eE][-+]?[0-9]{1,3}(?![0-9A-Za-z]))?|\.[0-9]+"
    r"|(?P<run>[^\W\d_\u2460-\u2473]{2,})|\S",
    re.DOTALL,
)
_THOUSANDS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9,])")
_SPACED_THOUSANDS = re.compile(r"[ $]*-?[0-9]{1,3}(?: [0-9]{3})+(?:\.[0-9]+)?[ $]*")
_DOUBLED = re.compile(r"(?<!\\)\\\\(?=[A-Za-z{}])")  # a doubled backslash where no line can break
_POWER = re.compile(r"([A-Za-z]{1,3}(?:/[a-z]{1,3})?)\s?\^\s?\{?([23])\}?")  # `\text{m/s^2}`
_JOINT = re.compile(r"(?:^|\s)(?:and|or)(?:\s|$)", re.IGNORECASE)
_DIGITS = {word: str(digit) for digit, word in enumerate("two three four five six seven eight nine ten".split(), 2)}
_BASE = rf"\\text\s*\{{\s*({'|'.join(_DIGITS)})\s*\}}"
_CIRCLE = r"(?:\\(?:circ|degree|textcirc)(?![A-Za-z])|\\text\s*\{\s*circ\s*\})"
_AFTER_TIME = r"(?:(?<=:[0-9][0-9])|(?<=[0-9])(?=\W{0,6}(?:text|mathrm|mbox)?\W{0,3}[ap]\.\s?m))"
_M = r"((?:[\s~]|\\[ ,;]|\\(?:text|mathrm|mbox)\s?\{)*)%s\.?\s?m(?![A-Za-z])\.?"
# Rewrites of a text, in this order: a string that it must hold, a pattern, and what takes its place. JSON, Python or
# LaTeX damage commands where a backslash is doubled or missing.
_TABLE: tuple[tuple[str, str, str | Callable[[re.Match[str]], str]], ...] = (
    ("\\u00B0", r"\\u00B0", r"\\degree "),
    ("quad", r"\\q?quad(?=[A-Za-z])", " "),
    ("\x0c", r"\x0c(?=rac)", r"\\f"),
    ("\x08", r"\x08(?=inom|ar|eta)", r"\\b"),
    ("\t", r"\t(?=heta|imes|ext(?:\{(?!\d+\})|circ))", r"\\t"),
    ("\r", r"\r(?=ho|ight)", r"\\r"),
    ("<sup>", r"<sup>([^<]{0,99})</sup>", r"^{\1}"),
    ("<sub>", r"<sub>([^<]{0,99})</sub>", r"_{\1}"),
    (">=", r">=", r" \\geq "),
    ("<=", r"<=", r" \\leq "),
    (" !=", r" !=", r" \\neq "),  # `2!=2` is a factorial.
    ("{array}", r"\\begin\{array\}\s{0,9}\{[^{}]{0,40}\}", r"\\begin{matrix}"),
    ("{array}", r"\\end\{array\}", r"\\end{matrix}"),
    ("t.", r"\\(?:left|right)\s?\.", ""),
    ("^", rf"\^\s*(?:{_CIRCLE}|\{{\s*{_CIRCLE}\s*\}})", r" \\degree "),
    ("\\prime", r"\^\s*(?:\\prime|\{(?:\s*\\prime)+\s*\})", lambda match: "'" * match[0].count("prime")),
    ("_", rf"_\s*(?:\{{\s*{_BASE}\s*\}}|{_BASE})", lambda match: "_" + _DIGITS[match[1] or match[2]]),
    (",", r"(?<=[0-9])\s?(?:\{,\s?\}|,\\!|\\,|,\\,)\s*(?=[0-9]{3}(?![0-9]))", ""),  # thousands
    ("/", r"(?<=[0-9])(?:\s(m|g|l|L)|\s?([ckm]m|kg|ft|mi))\s?/\s?(s|sec|min|hr?|m|L)(?![A-Za-z0-9])",
        r" \\text{\1\2/\3}"),
    ("m", rf"{_AFTER_TIME}{_M % 'a'}", r"\1 morning "),
    ("m", rf"{_AFTER_TIME}{_M % 'p'}", r"\1 afternoon "),
    ("M", rf"(?i){_AFTER_TIME}{_M % 'a'}", r"\1 morning "),
    ("M", rf"(?i){_AFTER_TIME}{_M % 'p'}", r"\1 afternoon "),
    ("0,", r"\A\s*(-?0),(0[0-9]+|[0-9]{3,})\s*\Z", r"\1.\2"),  # a decimal comma
    *((end, rf"(?<=[0-9])(?:\^\{{\s?(?:\\(?:text|mathrm|textrm)\{{\s?{end}\s?\}}|{end})\s?\}}"
        rf"|\^?\\(?:text|mathrm|textrm|textsuperscript)\{{\s?{end}\s?\}}|{end}(?![A-Za-z]))", "")
        for end in ("st", "nd", "rd", "th")),  # ordinals
    ("$", r"(?<![\\$])\$(?![$\s])([^$]{0,999}[^$\s\\])\$(?![$0-9])", r" \1 "),
)  # fmt: skip
_REWRITES = tuple((mark, re.compile(pattern), new) for mark, pattern, new in _TABLE)
_CIRCLED = re.compile("[\u2460-\u2473](?:[\\s,\u3001]{0,3}[\u2460-\u2473]){1,19}")
_CURRENCY = re.compile(r"(?<![\\$])\$(?=\s?\.?[0-9])")
_BRACKETED = re.compile(r"[(\[]|\\\{|\\lbrace|\\langle|matrix")

# ruff: noqa: RUF001  Signs that look like others are what this table is about.
_SIGNS = {
    **{code: chr(half) for code, half in HALF_WIDTH.items()},
    **dict.fromkeys(map(ord, "\u2212\u2013\u2014"), "-"),
    **dict.fromkeys(map(ord, "\u00a0\u2009\u202f"), " "),
    **dict.fromkeys(map(ord, "\u00b7\u22c5\u2219\u00d7"), " \\cdot "),
    **dict.fromkeys(map(ord, "\u00b0\u00ba"), " \\degree "),
    **{ord(sign): f" {command} " for sign, command in {
        "÷": "/", "π": "\\pi", "√": "\\surd", "∞": "\\infty", "≤": "\\leq", "≥": "\\geq", "≠": "\\neq", "±": "\\pm",
        "∪": "\\cup", "∩": "\\cap", "∈": "\\in", "∅": "\\emptyset", "²": "^{2}", "³": "^{3}", "½": "\\frac{1}{2}",
        "¼": "\\frac{1}{4}", "¾": "\\frac{3}{4}", "α": "\\alpha", "β": "\\beta", "θ": "\\theta", "λ": "\\lambda",
        "≈": "\\approx", "∀": "\\forall", "ℝ": "\\mathbb{R}", "ℤ": "\\mathbb{Z}", "∶": ":",
        "⊆": "\\subseteq", "⊇": "\\supseteq", "⊂": "\\subset", "⊃": "\\supset", "⊊": "\\subsetneq", "∠": "\\angle",
        "∁": "\\complement", "∃": "\\exists", "¬": "\\neg", "′": "'", "℃": "\\degree C", "…": "\\ldots", "ρ": "\\rho",
        "ω": "\\omega", "φ": "\\phi", "⌊": "\\lfloor", "⌋": "\\rfloor", "⌈": "\\lceil", "⌉": "\\rceil",
    }.items()},
}  # fmt: skip

_DROPPED = frozenset(
    "\\left \\right \\big \\Big \\bigg \\Bigg \\bigl \\bigr \\Bigl \\Bigr \\displaystyle \\textstyle \\limits \\quad"
    " \\qquad \\middle \\! \\, \\; \\: \\> ~ \\( \\) \\[ \\] \\boldmath".split()
) | {"\\ ", "$", "\\\n"}
_SPELLING = {
    "\\dfrac": "\\frac", "\\tfrac": "\\frac", "\\cfrac": "\\frac", "\\dbinom": "\\binom", "\\tbinom": "\\binom",
    "\\le": "\\leq", "\\ge": "\\geq", "\\leqslant": "\\leq", "\\geqslant": "\\geq", "\\ne": "\\neq", "\\lt": "<",
    "\\gt": ">", "\\times": "\\cdot", "*": "\\cdot", "\\ast": "\\cdot", "\\div": "/", "\\lvert": "|",
    "\\rvert": "|", "\\vert": "|", "\\lbrace": "\\{", "\\rbrace": "\\}", "\\lbrack": "[", "\\rbrack": "]",
    "\\%": "%", "\\varnothing": "\\emptyset", "\\dots": "\\ldots", "\\cdots": "\\ldots", "\\circ": "\\degree",
    "\\simeq": "\\approx", "\\doteq": "\\approx", "\\mid": "|", "\\colon": ":", "\\ratio": ":",
    "\\backslash": "\\setminus", "\\infin": "\\infty", "\\oslash": "\\emptyset", ";": ",", "\\lor": ",", "\\land": ",",
    "\\textcirc": "\\degree", "\\equiv": "=", "\\mod": "\\pmod", "\\overrightarrow": "\\vec", "\\tg": "\\tan",
    "\\ctg": "\\cot", "\\arctg": "\\arctan", "\\varsubsetneq": "\\subsetneq", "\\subsetneqq": "\\subsetneq",
}  # fmt: skip
_FUNCTIONS = {
    name: "\\" + name
    for name in "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp pi gcd lcm max min".split()
}
_FUNCTIONS["sqrt"] = "\\surd"  # Without a backslash, its argument may be in brackets, or a number of many digits.
_COMMANDS = {**_FUNCTIONS, "circ": "\\degree", "tg": "\\tan", "ctg": "\\cot", "arctg": "\\arctan"}  # as `\text{tg}`
_RUNS = {
    **_FUNCTIONS,
    "infinity": "\\infty",
    "inf": "\\infty",
    "theta": "\\theta",
    "pm": "\\pm",
    "and": ",",
    "or": ",",
}
_UNITS = frozenset(
    "cm mm km nm ft yd mi lb lbs kg mg oz ml mL sq deg mph kph hr hrs min sec rad kmh pct am pm day Day".split()
)
_SHORT = "for all any are the has not but one two six ten odd yes no".split()
_SHORT_WORDS = frozenset((*_SHORT, *map(str.capitalize, _SHORT), "It", "He"))  # never a product of letters


def plain(text: str) -> str:
    """Write signs as commands, repair commands, remove thousands separators, write a currency's dollar as `\\$`."""
    if not text.isascii():
        text = _CIRCLED.sub(_listed, text).translate(_SIGNS)
    if "\\begin" not in text:
        text = _DOUBLED.sub(r"\\", text)
    for mark, pattern, new in _REWRITES:
        if mark in text:
            text = pattern.sub(new, text)
    if not _BRACKETED.search(text):  # (1,000) is a pair, 1,000 is a number.
        text = _THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)
    if _SPACED_THOUSANDS.fullmatch(text):
        text = text.replace(" ", "")
    whole = text.strip(" .")
    is_formula = len(whole) > 1 and whole[0] == whole[-1] == "$"
    return text if is_formula else _CURRENCY.sub(lambda match: "\\$", text)


def _listed(match: re.Match[str]) -> str:
    """Return ascending circled numbers as a list; leave others, whose order has a meaning."""
    numbers = [ord(sign) - 0x245F for sign in match[0] if sign >= "\u2460"]
    return ", ".join(map(str, numbers)) if numbers == sorted(numbers) else match[0]


def spelled(match: re.Match[str], before: str) -> list[str]:
    """Return the tokens of one match of TOKEN; `before` is the token in front of it."""
    token = match[0]
    if match["text"] is not None:
        bold = token.startswith(("\\mathbf", "\\mathit", "\\bm", "\\boldsymbol"))
        return _text(match["text"], bold)
    if match["run"]:
        return _run(token, before)
    if token.startswith(("\\begin", "\\end")):
        return [re.sub(r"[\s*]", "", token)]
    if token.startswith("\\mathbb") and len(token) > 7:
        return [f"\\mathbb{{{token.rstrip('}')[-1]}}}"]
    if token[0].isdigit() and token.isascii():
        return [token.rstrip(".")]
    return [] if token in _DROPPED else [_SPELLING.get(token, token)]


def _text(content: str, bold: bool) -> list[str]:
    """Return the tokens of `\\text{...}`: words, or maths if it has a digit, no letter or one bold letter."""
    words = " ".join(content.replace("~", " ").split()).strip(".,;:")
    parts = _JOINT.split(words)
    if len(parts) > 1:
        listed = [token for part in parts for token in (",", *(_text(part, bold) if part else []))]
        return listed[1:]
    if words in _COMMANDS:
        return [_COMMANDS[words]]
    if power := _POWER.fullmatch(words):
        return [WORDS + power[1].casefold(), "^", power[2]]
    letter = re.fullmatch(r"\(?([A-Za-z])\)?", words)
    if letter:
        return [letter[1] if bold else WORDS + letter[1]]
    if re.search(r"[0-9\\]", words) or not re.search(r"[^\W\d_]", words):
        return [token for match in TOKEN.finditer(words) for token in spelled(match, "")]
    return [WORDS + words.casefold()]


def _run(run: str, before: str) -> list[str]:
    """Return the tokens of two or more letters in a row: a function, a connective, a word, or variables."""
    if run in _RUNS:
        return [_RUNS[run]]
    behind_value = bool(before) and (is_number(before) or before in ("}", ")") or before.startswith(WORDS))
    is_word = len(run) > 3 or not run.isascii() or run in _SHORT_WORDS or before.startswith(WORDS)
    if is_word or (run in _UNITS and behind_value):
        return [WORDS + run.casefold()]
    return list(run)


def is_number(token: str) -> bool:
    """Return True for a number; its sign is a separate token."""
    return token[0] in "0123456789" or (token[0] == "." and len(token) > 1)
