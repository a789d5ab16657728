"""Eight more languages of the table of announcements: Asian languages, then European ones. See `announcements`."""

# ruff: noqa: RUF001  Cyrillic letters look like Latin ones.
from trl_ext.rewards.text.announcements import Announcement, LanguageBlock, answer, is_right, option

JAPANESE = LanguageBlock(
    announcements=(
        *answer("Japanese", "答え|正解|正答|解答|回答", "は", unless="もし"),
        option("Japanese", "選択肢|正しいの", "は"),
        is_right("Japanese", "正解|正しい", "が", after="(?!で?は)"),
    ),
    nouns="答え|正解|解答|回答|選択肢|正しいの",
    wrong="[がと]?(?:では|じゃ|正解では)(?:な|あり)|は(?:間違|誤|不正|正しく)|とは限",
    joins="または|もしくは|[やとか]",
    ends="です|[にと]なります|である",
)

KOREAN = LanguageBlock(
    announcements=(
        *answer("Korean", "정답|답변|답", "[은는]", unless="만약|확인|검산"),
        option("Korean", "선택지|선택|보기|옵션", "[은는]"),
        is_right("Korean", "정답|맞|옳|올바", r"번?[이가]\s?", after=r"(?!이\s?아)"),
    ),
    nouns="정답|답변|답|선택지?|보기|옵션",
    wrong=r"번?(?:[은는이가]\s?(?:정답이\s?)?아[니닙닌]|[은는]\s?(?:틀|오답))",
    joins="또는|혹은|이?나|[와과]",
    ends="입니다|이다|이?에요|예요",
)

RUSSIAN = LanguageBlock(
    announcements=(
        *answer(
            *("Russian", "ответ", r"(?:[—–-]\sэто|[—–-]|равен|является|это)(?=\s)"), unless="провер|если|неверн|неправ"
        ),
        option("Russian", "вариант", r"(?:[—–-]\sэто|[—–-]|равен|является|это)(?=\s)"),
        is_right("Russian", "верн|прав", r"\s(?:[—–-]\s|является\s)?"),
    ),
    nouns="ответ|вариант",
    denies=r"не(?<!\wне)(?:\s(?:равен|является|думаю[^\n.]{0,20}))?\b",
    wrong=r"\s(?:[—–-]\s)?не(?:верн|правильн|\b)",
    joins=r"\b(?:и|или|либо)\b",
)

FRENCH = LanguageBlock(
    announcements=(
        *answer("French", "réponse", r"(?:est|serait)\b(?:\s(?:donc|alors)\b)?", unless="vérifi|mauvaise"),
        option("French", "l'option|option", r"(?:est|serait)\b"),
        is_right("French", "bonne|correct|juste", r"\sest\s(?:la\s)?"),
        Announcement("French", "choice", "choisis", r"choisis\b"),
    ),
    nouns="réponse|l'option",
    denies=r"(?:n'est\s(?:donc\s)?pas|pense\spas[^\n.]{0,25})\b",
    wrong=r"\s(?:est\s(?:fau|incorr)|n'est\spas)",
    joins=r"\b(?:ou(?:\sbien)?|et)\b",
)

GERMAN = LanguageBlock(
    announcements=(
        *answer(
            *("German", "antwort|lösung"),
            r"(?:ist|lautet|beträgt|wäre)\b(?:\s(?:also|daher|somit)\b)?|(?<=ist\sdie\santwort)",
            unless="prüf|wenn|falls|falsch",
        ),
        option("German", "option|alternative", r"(?:ist|lautet|wäre)\b"),
        is_right("German", "richtig|korrekt", r"\sist\s(?:die\s)?"),
        Announcement("German", "choice", "wähle", r"wähle\b"),
    ),
    nouns="antwort|lösung",
    denies=r"(?:nicht(?:,\sdass[^\n.]{0,20})?|niemals|kein(?<!\wkein)\w{0,7})\b",
    wrong=r"\sist\s(?:falsch|nicht)",
    joins=r"\b(?:oder|und|bzw)\b\.?",
)

SPANISH = LanguageBlock(
    announcements=(
        *answer("Spanish", "respuesta", r"(?:es|sería|será)\b", unless="verific|comprob"),
        option("Spanish", "opción|alternativa", r"(?:es|sería|será)\b"),
        is_right("Spanish", "correct|respuesta", r"\ses\s(?:la\s)?"),
        Announcement("Spanish", "choice", "elijo", r"elijo\b"),
    ),
    nouns="respuesta|opción",
    denies=r"(?:no(?<!\wno)|nunca)\s(?:es|puede\sser|creo[^\n.]{0,25})\b",
    wrong=r"\s(?:es\s(?:incorrect|fals)|no\ses)",
    joins=r"[ouye]\s",
)

ITALIAN = LanguageBlock(
    announcements=(
        *answer("Italian", "risposta", r"(?:è|sarebbe)\b"),
        option("Italian", "l'opzione|opzione", r"(?:è|sarebbe)\b"),
        is_right("Italian", "corrett|giust|risposta", r"\sè\s(?:la\s)?"),
        Announcement("Italian", "choice", "scelgo", r"scelgo\b"),
    ),
    nouns="risposta|(?:l')?opzione",
    denies=r"non\sè",
    wrong=r"\s(?:è\s(?:sbagliat|errat|fals)|non\sè)",
    joins=r"\b(?:od|ed|oppure)\b",
)

PORTUGUESE = LanguageBlock(
    announcements=(
        *answer("Portuguese", "resposta", r"(?:é|seria)\b"),
        option("Portuguese", "alternativa|opção|letra", r"(?:é|seria)\b"),
        is_right("Portuguese", "corret|cert|resposta", r"\s(?:é|está)\s(?:a\s)?"),
        Announcement("Portuguese", "choice", "escolho", r"escolho\b"),
    ),
    nouns=r"resposta|(?:a\s)?(?:alternativa|opção|letra)",
    denies=r"não\sé(?:\sa\sletra)?",
    wrong=r"\s(?:é\s(?:incorret|fals|errad)|não\sé|está\sinc)",
    joins=r"ou\s",
)

OTHERS = (JAPANESE, KOREAN, RUSSIAN, FRENCH, GERMAN, SPANISH, ITALIAN, PORTUGUESE)
