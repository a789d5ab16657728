"""Words with which languages beside English announce an answer, for `reader`, `choices` and `denial`."""

# ruff: noqa: RUF001  Cyrillic letters look like Latin ones.
import re

# Rows: Chinese, Japanese, Korean, Russian, French, German, Spanish, Italian, Portuguese. Columns: "answer" (small, no
# pattern); "is"; "option"; " is correct"; "is not"; " is wrong"; "or"; what before "answer" takes it back: "check".
# fmt: off
_LANGUAGES = (
    ("答案|答", "应?该?就?[是为选]", "(?:正确的)?选项|正确的", r"(?:选?项)?\s?[是为]?正确",
     r"不(?:可能|应该?)?是|不(?:等于|为|选)|不认为[^\n。]{0,9}|并非|没有|除了", r"是?错|[^\s\d，。]{0,2}不[正对是]",
     "或者?|还是|以?及|[和与]", "[检核]查|验[证算]|检验|核对|如果|假设|若|错误|不正确"),
    ("答え|正解|解答|回答", "は", "選択肢|正しいの", "が(?:正解|正しい)(?!で?は)", "",
     "[がと]?(?:では|じゃ|正解では)(?:な|あり)|は(?:間違|誤|不正|正しく)|とは限", "または|もしくは|[やとか]", "もし"),
    ("정답|답변|답", "[은는]", "선택지?|보기|옵션", r"번?[이가]\s?(?:정답(?!이\s?아)|맞|옳|올바)", "",
     r"번?(?:[은는이가]\s?(?:정답이\s?)?아[니닙닌]|[은는]\s?(?:틀|오답))", "또는|혹은|이?나|[와과]", "만약|확인|검산"),
    ("ответ", r"(?:[—–-]\sэто|[—–-]|равен|является|это)(?=\s)", "вариант", r"\s(?:[—–-]\s|является\s)?(?:верн|прав)",
     r"не(?<!\wне)(?:\s(?:равен|является|думаю[^\n.]{0,20}))?\b", r"\s(?:[—–-]\s)?не(?:верн|правильн|\b)",
     r"\b(?:и|или|либо)\b", "провер|если|неверн|неправ"),
    ("réponse", r"(?:est|serait)\b(?:\s(?:donc|alors)\b)?", "l['’]option", r"\sest\s(?:la\s)?(?:bonne|correct|juste)",
     r"(?:n['’]est\s(?:donc\s)?pas|pense\spas[^\n.]{0,25})\b", r"\s(?:est\s(?:fau|incorr)|n['’]est\spas)",
     r"\b(?:ou(?:\sbien)?|et)\b", "vérifi|mauvaise"),
    ("antwort|lösung", r"(?:ist|lautet|beträgt|wäre)\b(?:\s(?:also|daher|somit)\b)?|(?<=ist\sdie\santwort)", "",
     r"\sist\s(?:die\s)?(?:richtig|korrekt)", r"(?:nicht(?:,\sdass[^\n.]{0,20})?|niemals|kein(?<!\wkein)\w{0,7})\b",
     r"\sist\s(?:falsch|nicht)", r"\b(?:oder|und|bzw)\b\.?", "prüf|wenn|falls|falsch"),
    ("respuesta", r"(?:es|sería|será)\b", "opción", r"\ses\s(?:la\s)?(?:correct|respuesta)",
     r"(?:no(?<!\wno)|nunca)\s(?:es|puede\sser|creo[^\n.]{0,25})\b", r"\s(?:es\s(?:incorrect|fals)|no\ses)",
     r"[ouye]\s", "verific|comprob"),
    ("risposta", r"(?:è|sarebbe)\b", r"(?:l['’])?opzione", r"\sè\s(?:la\s)?(?:corrett|giust|risposta)", r"non\sè",
     r"\s(?:è\s(?:sbagliat|errat|fals)|non\sè)", r"\b(?:od|ed|oppure)\b", ""),
    ("resposta", r"(?:é|seria)\b", r"(?:a\s)?(?:alternativa|opção|letra)", r"\s(?:é|está)\s(?:a\s)?(?:corret|cert|r)",
     r"não\sé(?:\sa\sletra)?", r"\s(?:é\s(?:incorret|fals|errad)|não\sé|está\sinc)", r"ou\s", ""),
)
# fmt: on
NOUN, _LINK, OPTION, RIGHT, DENIES, WRONG, OR, _CHECK = (
    f"(?:{'|'.join(filter(None, column))})" for column in zip(*_LANGUAGES, strict=True)
)
NOUNS = ("answer", *NOUN[3:-1].split("|"))
ASCII_NOUNS = tuple(noun for noun in NOUNS if noun.isascii())
_WORD = r"(?:\s(?!inc|err|sbag|fal)[^\s.,:;!?]{1,14})"
ANNOUNCES = rf"(?<![대응]){NOUN}[a-zа-яё]{{0,2}}?\*{{0,2}}(?:{_WORD}{{0,2}}?\s?[:=\uff1a】]|{_WORD}{{0,4}}?\s?{_LINK})"
UNLESS = re.compile(rf"{_CHECK}[^\n.:,\uff0c\u3002]{{0,14}}\Z", re.IGNORECASE)
CHOOSES = rf"(?:option|alternative|{OPTION})(?:\scorr[a-z]{{1,5}})?\s?(?:[:\uff1a]|{_LINK})"
LEADS = rf"[\s(\[*\"'`\u2705]*+(?>(?:(?:option|choice|letter|answer|{NOUN}|{OPTION}|(?:la|die)\s|l['’])\s*+){{0,2}})"
LETTER = rf"{LEADS}[(\[*]*+(?P<letter>[A-J])(?![A-Za-z0-9'\u00c0-\u024f])"
ENDS = re.compile(r"\s?(?:です|[にと]なります|である|입니다|이다|이?에요|예요)[.\u3002!*]{0,4}\s*\Z|\u3002.*")  # "is"
