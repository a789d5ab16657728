"""Words that change a number in ten languages: factors, "about", minus, roots, shares, "more than"."""

# ruff: noqa: RUF001  Cyrillic letters look like Latin ones.
import re

# Words that multiply a number, by factor. A full stop may follow: "3 Mio. Euro".
_FACTORS = {
    10: "十 십 десяток десятка десятков dizaine dizaines decena decenas decina decine dezena dezenas",
    12: "dozen dozens 打 дюжина дюжины дюжин douzaine douzaines dutzend docena docenas dozzina dozzine dúzia dúzias",
    100: "hundred hundreds 百 백 сотня сотни сотен centaine centaines hundert cientos centinaia centena centenas",
    10**4: "万 萬 만", 10**5: "lakh lakhs", 10**7: "crore crores",
    10**3: "thousand thousands 千 천 тысяча тысячи тысяч тыс mille tausend tsd mil mila millier"
    " milliers millares migliaia milhares",
    10**6: "million millions миллион миллиона миллионов млн millionen mio millón millones milione milioni"
    " milhão milhões",
    10**8: "亿 億 억",
    10**9: "billion billions миллиард миллиарда миллиардов млрд milliard milliards milliarde milliarden mrd miliardo"
    " miliardi bilhão bilhões",
    10**12: "trillion trillions 兆 조 триллион триллиона триллионов billionen billón billones trilhão trilhões",
}  # fmt: skip
FACTORS = {word: factor for factor, words in _FACTORS.items() for word in words.split()}
_END = r"(?![a-z\u00df-\u00ffа-яё])"
# 千克 is a kilogram, 百分 a percent.
FACTOR = rf"(?:{'|'.join(sorted(FACTORS, key=len, reverse=True))}){_END}(?<!千(?=[克米瓦卡帕赫焦伏]))(?<!百(?=分))"
AND_A_HALF = (
    r"\s?(?:and\sa\shalf|einhalb|et\sdemie?|y\smedi[oa]|e\smezz[oa]|e\smei[oa]|с\sполовиной|又二分之一|个半)" + _END
)
ABOUT = (
    r"(?:大?[约約]为?|总?一?共|等于|およそ|약\s|(?:около|примерно|всего|environ|au\stotal|etwa|ungefähr|rund|insgesamt|circa"
    r"|unos|aproximadamente|en\stotal|in\stotale|no\stotal|cerca\sde)\s)"
)
_MINUS = re.compile(
    r"(?<![0-9)\]}%\s])\s*(?:负|負|零下|マイナス|마이너스|음수|영하)\s?(?=[0-9.$\\])"
    r"|(?<![\w)\]}%])(?<![0-9)\]}%]\s)(?<!\bau\s)(?<!\bal\s)(?<!\blo\s)(?<!\bpelo\s)"
    r"(?:minus|negativ[eo]?|минус|moins|menos|meno)\s(?=[0-9.$\\])",
    re.IGNORECASE,
)
_ROOT = re.compile(
    r"(?:(?<![a-z])(?:the|la|die|a)\s)?(?:根号|ルート|루트|(?<!\w)(?:(?:квадратный\s)?корень\sиз|racine(?:\scarrée)?\sde"
    r"|(?:quadrat)?wurzel(?:\s(?:aus|von))?|ra[ií]z(?:\s[cq]uadrada)?\sde|radice(?:\squadrata)?\sdi"
    r"|(?:square\s)?root(?:\sof)?))\s?([0-9]{1,30})(?![0-9,.]*[0-9])|([0-9]{1,30})(?:[的の]平方根|의\s?제곱근)",
    re.IGNORECASE,
)
# Words directly before a number in running text that change it: "more than", "half of", "10 less 3".
CHANGES_BEFORE = re.compile(
    r"(?:[0-9]\(|至[少多]|最[少多]|[大小多少高低]于|超过|不[到足]|接近|根号|[负負]|除以|乘以?|减去?|加上?|(?<!百)分の?之?|[0-9]\s?[多少和百千万亿億만억천백]"
    r"|ルート|루트|(?:\b(?:mehr|weniger|größer|kleiner|mindestens|höchstens|больше|меньше|более|менее|más|mayor|menor"
    r"|almeno|più|maggiore|minore|mais|maior|plus|moins|minus|минус|menos|meno|mal|hoch|supérieure?|inférieure?|multiple"
    r"|корень|racine|\w{0,7}wurzel|ra[ií]z|radice|double|doppelte|doble|dobro|doppio|hälfte|moitié|mitad|metade|metà)"
    r"(?:\s(?:carrée|cuadrada|quadrat?a))?(?:\s(?:de|di|do|da|que|von|als|aus|à|a|чем|из))?\s))[是有为]?\Z",
    re.IGNORECASE,
)
# After a number: "of", a power, "or more", "between", tenths.
CHANGES_BEHIND = re.compile(
    r"\s?(?:[的の의又多余成割折할]|分の?之|半)|[^\W\da-zA-Z]{0,3}\s?(?:以[上下内外]|之间|未満|より|보다|이[상하]|미만|초과|を?超|乗|半|제곱|多(?:一点)?\s*\Z)"
    r"|\s(?:au\sc(?:arré|ube)|a[lo]\s(?:cuad|quad|cub)\w+|в\s(?:квадрате|кубе|степени)|[iz]u?m\squadrat|hoch|al(?:la|\s?cubo)|elev|puissance|fa[ck]?[kt]\w*rial|factorielle|fakult|fattorial|факториал)",
    re.IGNORECASE,
)
_SHARE = re.compile(r"([0-9]{1,30})\s?分[の之]\s?([0-9]{1,30})(?![0-9.,/])")
_GROUPS = re.compile(r"(?<![\d.,])(\d{1,3}(?:\.\d{3})+)(?:,(\d+)(?!\d|[.,]\d)|(?<=\.\d{3}\.\d{3})(?![\d,]))")
_WITH_SIGN = re.compile(r"(?<![\d.,])(\d{1,12}),(\d{1,2})(?=\s?[€£%°])")


def in_signs(text: str, *, with_roots: bool = False) -> str:
    r"""Write a minus, a share, groups of digits and, with `with_roots`, square roots in English signs.

    Example:
        >>> in_signs("минус 3"), in_signs("根号3", with_roots=True), in_signs("1.234,56 euros")
        ('-3', '\\sqrt{3}', '1234.56 euros')
    """
    text = _SHARE.sub(r"\2/\1", text) if "分" in text else text
    text = _ROOT.sub(lambda match: f"\\sqrt{{{match[1] or match[2]}}}", text) if with_roots else text
    text = _WITH_SIGN.sub(lambda match: f"{match[1]}.{match[2]}", _MINUS.sub("-", text.replace("R$ ", "$")))
    return _GROUPS.sub(lambda match: match[1].replace(".", "") + (f".{match[2]}" if match[2] else ""), text)
