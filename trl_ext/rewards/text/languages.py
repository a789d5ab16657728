"""Words of answers in ten languages: announcements, denials, and words that change a number."""

# ruff: noqa: RUF001  Cyrillic letters look like Latin ones.
import re

# Rows: Chinese, Japanese, Korean, Russian, French, German, Spanish, Italian, Portuguese. Columns: "answer" (small, no
# pattern); "is"; "option"; " is correct"; "is not"; " is wrong"; "or"; words before "answer" that cancel it: "check".
# fmt: off
_LANGUAGES = (
    ("答案|答", "应?该?就?[是为选]", "(?:正确的)?选项|正确的", r"(?:选?项)?\s?[是为]?正确",
     r"不(?:可能|应该?)?是|不(?:等于|为)|(?:不(?:应该?|可以?|[能要会该])?|[别勿莫])选择?|不认为[^\n。]{0,9}|并非|没有|除了|排除",
     r"是?错|(?:,\s)?不[正对]|[^\s\d,。]{0,2}不(?:[正对]|是(?!\s?\(?[A-Z]))",
     "或者?|还是|以?及|[和与]", "[检核]查|验[证算]|检验|核对|如果|假设|若|错误|不正确"),
    ("答え|正解|解答|回答", "は", "選択肢|正しいの", "が(?:正解|正しい)(?!で?は)", "",
     "[がと]?(?:では|じゃ|正解では)(?:な|あり)|は(?:間違|誤|不正|正しく)|とは限", "または|もしくは|[やとか]", "もし"),
    ("정답|답변|답", "[은는]", "선택지?|보기|옵션", r"번?[이가]\s?(?:정답(?!이\s?아)|맞|옳|올바)", "",
     r"번?(?:[은는이가]\s?(?:정답이\s?)?아[니닙닌]|[은는]\s?(?:틀|오답))", "또는|혹은|이?나|[와과]", "만약|확인|검산"),
    ("ответ", r"(?:[—–-]\sэто|[—–-]|равен|является|это)(?=\s)", "вариант", r"\s(?:[—–-]\s|является\s)?(?:верн|прав)",
     r"не(?<!\wне)(?:\s(?:равен|является|думаю[^\n.]{0,20}))?\b", r"\s(?:[—–-]\s)?не(?:верн|правильн|\b)",
     r"\b(?:и|или|либо)\b", "провер|если|неверн|неправ"),
    ("réponse", r"(?:est|serait)\b(?:\s(?:donc|alors)\b)?", "l'option", r"\sest\s(?:la\s)?(?:bonne|correct|juste)",
     r"(?:n'est\s(?:donc\s)?pas|pense\spas[^\n.]{0,25})\b", r"\s(?:est\s(?:fau|incorr)|n'est\spas)",
     r"\b(?:ou(?:\sbien)?|et)\b", "vérifi|mauvaise"),
    ("antwort|lösung", r"(?:ist|lautet|beträgt|wäre)\b(?:\s(?:also|daher|somit)\b)?|(?<=ist\sdie\santwort)", "",
     r"\sist\s(?:die\s)?(?:richtig|korrekt)", r"(?:nicht(?:,\sdass[^\n.]{0,20})?|niemals|kein(?<!\wkein)\w{0,7})\b",
     r"\sist\s(?:falsch|nicht)", r"\b(?:oder|und|bzw)\b\.?", "prüf|wenn|falls|falsch"),
    ("respuesta", r"(?:es|sería|será)\b", "opción", r"\ses\s(?:la\s)?(?:correct|respuesta)",
     r"(?:no(?<!\wno)|nunca)\s(?:es|puede\sser|creo[^\n.]{0,25})\b", r"\s(?:es\s(?:incorrect|fals)|no\ses)",
     r"[ouye]\s", "verific|comprob"),
    ("risposta", r"(?:è|sarebbe)\b", r"(?:l')?opzione", r"\sè\s(?:la\s)?(?:corrett|giust|risposta)", r"non\sè",
     r"\s(?:è\s(?:sbagliat|errat|fals)|non\sè)", r"\b(?:od|ed|oppure)\b", ""),
    ("resposta", r"(?:é|seria)\b", r"(?:a\s)?(?:alternativa|opção|letra)", r"\s(?:é|está)\s(?:a\s)?(?:corret|cert|r)",
     r"não\sé(?:\sa\sletra)?", r"\s(?:é\s(?:incorret|fals|errad)|não\sé|está\sinc)", r"ou\s", ""),
)
# fmt: on
NOUN, _LINK, OPTION, RIGHT, DENIES, WRONG, OR, _CHECK = (
    f"(?:{'|'.join(filter(None, column))})" for column in zip(*_LANGUAGES, strict=True)
)
NOUNS = ("answer", *(one for one in NOUN[3:-1].split("|") if one != "答案"))  # 答 finds it
ASCII_NOUNS = tuple(noun for noun in NOUNS if noun.isascii())
_WORD = r"(?:\s(?!inc|err|sbag|fal)[^\s.,:;!?]{1,14})"
ANNOUNCES = rf"(?<![대응]){NOUN}[a-zа-яё]{{0,2}}?\*{{0,2}}(?:{_WORD}{{0,2}}?\s?[:=\]]|{_WORD}{{0,4}}?\s?{_LINK})"
UNLESS = re.compile(rf"{_CHECK}[^\n.:\u3002]{{0,14}}\Z", re.IGNORECASE)
CHOOSES = rf"(?:option|alternative|{OPTION})(?:\scorr[a-z]{{1,5}})?\s?(?::|{_LINK}(?:\s?:)?)"
LEADS = rf"[\s(\[*\"'`\u2705]*+(?>(?:(?:option|choice|letter|answer|{NOUN}|{OPTION}|(?:la|die)\s|l')\s*+){{0,2}})"
LETTER = rf"{LEADS}[(\[*\"']*+(?P<letter>[A-Z])(?![A-Za-z0-9\u00c0-\u024f]|'[A-Za-z])"
ENDS = re.compile(r"\s?(?:です|[にと]なります|である|입니다|이다|이?에요|예요)[.\u3002!*]{0,4}\s*\Z|\u3002.*")  # "is"

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
    text = _WITH_SIGN.sub(r"\1.\2", _MINUS.sub("-", text.replace("R$ ", "$")))
    return _GROUPS.sub(lambda match: match[1].replace(".", "") + (f".{match[2]}" if match[2] else ""), text)
