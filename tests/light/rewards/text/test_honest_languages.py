r"""Honest completions in ten languages are paid; with another value, hedged or denied they never are.

A form holds `{}` for the answer. Each is tried with a number under `Answer` and `Math`, with a letter under both, and
with a word as `exact`, where the table of its language has these.
"""

# ruff: noqa: RUF001, E501  Letters that look alike, and tables.
from dataclasses import dataclass

import pytest

from trl_ext.rewards import Answer, Math, Row

pytest.importorskip("math_verify")


@dataclass(frozen=True)
class Forms:
    """How a language states an answer of any kind, a number and a letter; what it puts between two; how it denies."""

    stated: tuple[str, ...]
    numbers: tuple[str, ...]
    letters: tuple[str, ...]
    hedges: tuple[str, ...]
    denied: tuple[str, ...]
    word: str


# fmt: off
LANGUAGES = {
    "zh": Forms(
        ("答案是{}。", "答案：{}", "正确答案是 {}。", "最终答案为{}", "因此，答案是 {}。", "**答案：** {}", "最终答案：{}", "综上所述，正确答案为：{}。",
         "答：{}", "答案\n\n{}", "答案应为{}。", "所以答案就是{}。"),
        ("答案是42元。", "答：一共有42个苹果。", "所以一共有42个苹果。", "答案是$42$。", "答案为 **42**。", "答：小明现在有42元。", "因此 $x = 42$。"),
        ("正确选项是 B", "选项B正确。", "故选B。", "所以选 B。", "因此选B。", "应选 B。", "本题选B。", "故选：B", "答案选B。", "正确选项：B", "选项是 B。",
         "正确的选项是 B。", "B选项正确。", "B是正确的。", "B 是正确答案。", "答案是选项B。", "答案是B，因为A不对。", "故答案为：B.", "A错误，B正确。所以选B。", "我选择 B。"),
        ("{}或{}", "{}和{}", "{} 或者 {}", "{}、{}", "{}还是{}"),
        ("答案不是{}。", "正确答案并非{}。", "{}是错误的。", "{}不正确。", "答案不可能是{}。"),
        "北京",
    ),
    "ja": Forms(
        ("正解は{}です。", "答えは{}です。", "答え：{}", "答え: {}", "正しい答えは{}です。", "したがって、答えは{}です。", "**答え：{}**", "最終的な答えは{}です。",
         "答えは{}になります。", "よって、正解は {} です。", "解答：{}", "回答：{}", "答えは{}。"),
        ("答えは42個です。", "答えは42円です。", "よって、42です。", "りんごは全部で42個です。", "答えは $42$ です。", "合計で42円になります。"),
        ("正解はBです。", "正しい選択肢はBです。", "Bが正解です。", "選択肢Bが正しいです。", "正解は選択肢Bです。", "正解：B", "したがって、Bが正しい。", "答えはBとなります。"),
        ("{}または{}", "{}か{}", "{}と{}"),
        ("答えは{}ではありません。", "正解は{}ではない。", "答えは{}ではないです。", "{}は間違いです。"),
        "東京",
    ),
    "ko": Forms(
        ("정답은 {}입니다.", "정답: {}", "정답 : {}", "답: {}", "답은 {}입니다.", "따라서 정답은 {}입니다.", "최종 답: {}", "**정답: {}**", "올바른 답은 {}입니다.",
         "정답은 {}이다.", "따라서 답은 {} 입니다.", "정답은 {}이에요."),
        ("정답은 42개입니다.", "답은 42원입니다.", "따라서 사과는 모두 42개입니다.", "정답은 $42$입니다.", "그러므로 $x = 42$입니다."),
        ("정답은 B입니다.", "정답은 B번입니다.", "올바른 선택지는 B입니다.", "B가 정답입니다.", "정답은 선택지 B입니다.", "따라서 B가 맞습니다.", "정답은 (B)입니다."),
        ("{} 또는 {}", "{}이나 {}", "{}와 {}"),
        ("정답은 {}가 아닙니다.", "답은 {}이 아니다.", "{}는 틀렸습니다."),
        "서울",
    ),
    "ru": Forms(
        ("Ответ: {}", "Ответ: {}.", "**Ответ:** {}", "Правильный ответ: {}", "Правильный ответ — {}.", "Ответ — {}", "Итак, ответ: {}.", "Окончательный ответ: {}",
         "Правильным ответом является {}.", "Верный ответ: {}", "Ответ - {}", "Ответ:\n\n{}", "Ответ на вопрос: {}."),
        ("Ответ: 42 рубля.", "Ответ равен 42.", "Ответ: $42$", "Итого у неё 42 яблока.", "Значит, $x = 42$."),
        ("Ответ: вариант B", "Правильный вариант — B.", "Правильный ответ B.", "Вариант B верный.", "Правильный вариант ответа: B", "B — правильный ответ.", "Ответ: (B)"),
        ("{} или {}", "{} и {}", "{} либо {}"),
        ("Ответ не {}.", "Правильный ответ — не {}.", "{} — неверный ответ.", "Ответ не равен {}."),
        "Москва",
    ),
    "fr": Forms(
        ("Réponse : {}", "**Réponse : {}**", "La réponse est {}.", "La bonne réponse est {}.", "Réponse\u00a0: {}", "La réponse correcte est {}.", "La réponse finale est {}.",
         "Donc la réponse est {}.", "La réponse à la question est {}.", "RÉPONSE : {}", "Réponse finale : {}", "La réponse est donc {}."),
        ("La réponse est 42 euros.", "La réponse est $42$.", "Elle a donc 42 pommes.", "La réponse est : **42**"),
        ("La bonne réponse est la B.", "La réponse est l'option B.", "L'option B est correcte.", "La réponse B est la bonne.", "Réponse : (B)", "B est la bonne réponse.",
         "Je choisis B.", "La bonne option est B."),
        ("{} ou {}", "{} et {}", "{} ou bien {}"),
        ("La réponse n'est pas {}.", "{} est faux.", "Ce n'est pas {}.", "La bonne réponse n’est pas {}."),
        "Lyon",
    ),
    "de": Forms(
        ("Antwort: {}", "**Antwort:** {}", "Die Antwort ist {}.", "Die richtige Antwort ist {}.", "Die Antwort lautet {}.", "Die korrekte Antwort lautet: {}",
         "Endgültige Antwort: {}", "Die Antwort ist also {}.", "Also ist die Antwort {}.", "Die Antwort auf die Frage ist {}.", "Die richtige Antwort ist:\n\n{}", "Lösung: {}"),
        ("Die Antwort ist 42 Euro.", "Die Antwort ist $42$.", "Sie hat also 42 Äpfel.", "Die Antwort beträgt 42."),
        ("Die richtige Antwort ist Option B.", "Antwort B ist richtig.", "B ist richtig.", "B ist die richtige Antwort.", "Die richtige Option ist B.", "Option B ist korrekt.",
         "Ich wähle B.", "Antwort: (B)"),
        ("{} oder {}", "{} und {}", "{} bzw. {}"),
        ("Die Antwort ist nicht {}.", "{} ist falsch.", "Die richtige Antwort ist keinesfalls {}.", "Es ist nicht {}."),
        "Berlin",
    ),
    "es": Forms(
        ("Respuesta: {}", "**Respuesta:** {}", "La respuesta es {}.", "La respuesta correcta es {}.", "La respuesta final es {}.", "La respuesta es: {}", "Por lo tanto, la respuesta es {}.",
         "Respuesta final: {}", "Respuesta correcta: {}", "La respuesta a la pregunta es {}.", "RESPUESTA: {}", "La respuesta sería {}."),
        ("La respuesta es 42 euros.", "La respuesta es $42$.", "Así que tiene 42 manzanas.", "La respuesta es **42**."),
        ("La respuesta correcta es la B.", "La respuesta correcta es la opción B.", "La opción correcta es B.", "La opción B es correcta.", "La opción correcta es la B.",
         "B es la respuesta correcta.", "Elijo B.", "Respuesta: (B)"),
        ("{} o {}", "{} y {}", "{} u {}"),
        ("La respuesta no es {}.", "{} es incorrecto.", "No es {}.", "La respuesta correcta nunca es {}."),
        "Madrid",
    ),
    "it": Forms(
        ("Risposta: {}", "La risposta è {}.", "La risposta corretta è {}.", "**Risposta:** {}", "La risposta giusta è {}.", "Quindi la risposta è {}.", "Risposta finale: {}"),
        ("La risposta è 42 euro.", "La risposta è $42$.", "Quindi ha 42 mele."),
        ("La risposta corretta è la B.", "La risposta corretta è l'opzione B.", "L'opzione corretta è B.", "L'opzione B è corretta.", "B è la risposta corretta."),
        ("{} o {}", "{} e {}", "{} oppure {}"),
        ("La risposta non è {}.", "{} è sbagliato.", "Non è {}."),
        "Roma",
    ),
    "pt": Forms(
        ("Resposta: {}", "A resposta é {}.", "A resposta correta é {}.", "**Resposta:** {}", "Portanto, a resposta é {}.", "Resposta final: {}", "A resposta certa é {}."),
        ("A resposta é 42 reais.", "A resposta é $42$.", "Logo ela tem 42 maçãs."),
        ("A resposta correta é a alternativa B.", "A alternativa correta é B.", "A alternativa B está correta.", "A resposta correta é a letra B.", "B é a resposta correta."),
        ("{} ou {}", "{} e {}"),
        ("A resposta não é {}.", "{} é incorreto.", "Não é {}."),
        "Lisboa",
    ),
    "en": Forms(
        ('{{"answer": "{}"}}', 'We look at it.\n\n```json\n{{"answer": "{}"}}\n```', '{{"reasoning": "43 and C are tempting.", "final_answer": "{}"}}',
         'So this is it:\n{{"answer": "{}", "confidence": 0.9}}', '```json\n{{\n  "steps": ["A", "7"],\n  "answer": "{}"\n}}\n```', '```\n{{"choice": "{}"}}\n```'),
        ("So the answer is forty-two (42).", "The answer is **forty-two (42)**.", '{"answer": 42}', "✅ 42", "The answer is 42 with an actual total income of $931,441.", "Forty-two (42).",
         "The answer is forty two (42) apples.", "The answer is 42 i.e. many.", "The answer is 42 E. coli.", "She counted 42 E. coli."),
        ("✅ B", "✅ **B**", "✅ B) Paris", "Based on the above analysis, B.", "Based on the above analysis, the answer is B.", "Based on this, (B).", "✅ Answer: B"),
        ("{} or {}", "{} and {}", "{} / {}"),
        ('{{"answer": "not {}"}}', "It is not {}.", "No, {} is wrong."),
        "Paris",
    ),
}
# Written down when the words of the languages stood, to see what these leave out.
LETTERS = (
    "综上所述，B选项是正确的。", "因此，本题答案为B。", "所以正确答案是：**B**", "根据以上分析，应选择B。", "因此答案选择B选项。", "【答案】B", "答案：B\n\n解析：A选项错误，因为……", "【答案】B\n【解析】C项错误。", "故答案选B。",
    "故本题选B。", "答案是 (B) 巴黎。", "最终答案：\\boxed{B}", "正确答案应该是B", "A、C、D错误，故选B。", "选项A不正确，选项C不正确，所以选项B是正确答案。", "我认为答案是B，理由如下：A不对。", "正确答案为选项B：巴黎。",
    "因此选项B正确", "只有B符合题意。", "综上，选B。", "答案：选B", "答案：B. 巴黎", "B。因为地球是圆的。", "B. 巴黎", "选B，因为A错误。", "所以，B为正确答案。", "答案就是B啦！", "正确的是B。",
    "したがって、正解は**B**です。", "正解は B（東京）です。", "正解はBの東京です。", "答えはB。理由は…", "よって、答えは選択肢Bである。", "正しいのはBです。", "Bが正しい選択肢です。", "したがって、Bが最も適切です。", "【答え】B",
    "答え B", "正答はBです。", "解答: (B)", "最も適切な選択肢はBです。", "Aは誤り。よって答えはB。", "정답은 **B**입니다.", "정답은 B) 서울입니다.", "답은 (B)입니다.",
    "올바른 답은 B입니다. 왜냐하면 A는 틀렸기 때문입니다.", "따라서 정답은 B번입니다.", "정답: B. 서울", "정답은 B", "그러므로 B가 정답이다.", "최종 답변: B", "따라서, 올바른 선택은 B입니다.", "정답은 보기 B입니다.",
    "Правильный ответ: **B**.", "Ответ: B) Москва", "Правильный ответ — вариант B.", "Верный вариант: B", "Итак, правильный вариант ответа — B.",
    "Ответ: B, так как A неверно.", "Таким образом, верным является вариант B.", "Правильный ответ - B.", "Ответом является вариант B.",
    "Вариант B является правильным.", "La bonne réponse est donc la réponse B.", "La réponse est (B) Paris.", "Réponse : B) Paris",
    "La réponse correcte est **B**.", "Donc, la bonne réponse est : B", "C'est la réponse B.", "L'option correcte est B.",
    "L'option B est la bonne réponse.", "La bonne réponse est B car A est faux.", "Je choisis la réponse B.", "Réponse B.",
    "Par conséquent, B est correct.", "Die richtige Antwort lautet: B", "Richtige Antwort: B", "Die Antwort ist (B) Berlin.",
    "Antwort: B) Berlin", "Die richtige Antwort ist daher B.", "Somit ist B die richtige Antwort.", "Daher ist die richtige Antwort B.",
    "Richtig ist Antwort B.", "Richtig ist B.", "Ich entscheide mich für B.", "Die korrekte Option ist B.", "Die Lösung ist B.", "Antwort B",
    "Antwort: B, weil A falsch ist.", "La respuesta correcta es **B**.", "Respuesta: B) Madrid", "La respuesta es (B).",
    "Por lo tanto, la opción correcta es la B.", "Opción B.", "La alternativa correcta es B.", "La respuesta correcta es la letra B.",
    "Respuesta correcta: B.", "Elegiría la opción B.", "La correcta es la B.", "La respuesta correcta es: b)", "La risposta corretta è **B**.",
    "Risposta: B) Roma", "Risposta corretta: B", "L'opzione corretta è la B.", "La risposta esatta è B.",
    "Quindi la risposta corretta è l'opzione B.", "A resposta correta é **B**.", "Resposta: B) Lisboa", "Resposta correta: B", "Alternativa B",
    "A alternativa correta é a letra B.", "Portanto, a resposta correta é a opção B.", "Letra B.", "A opção correta é B.", "{\"answer\":\"B\"}",
    "{\"choice\": \"B\"}", "```json\n{\"answer\": \"(B)\"}\n```", "{\"answer\": \"B) Paris\"}",
    "{\"explanation\": \"A: no\\nC: no\", \"answer\": \"B\"}", "{\"final_answer\": \"B. Paris\"}\n", "✅ **B) Paris**", "✅ (B)",
    "Based on the passage, B.", "Based on the reasoning above, B) Paris.", "Based on the analysis, the best option is B.", "✅ Final answer: B",
    "```\n{\n \"answer\": \"B\"\n}\n```\n",
)
NUMBERS = (
    "【答案】42", "答案：42个", "所以小明还剩42元。", "答：小明还剩42元。", "因此总共需要42天", "最后结果是42。", "结果为 42", "答案：$42$ 元", "答案为：42。", "一共是 42 个。", "综上，答案是42千克。",
    "故答案为：$42$。", "所以 x 的值是 42。", "答案：四十二（42）", "共42人。", "合計42円です。", "答えは 42個 になります。", "よって答えは42km。", "答えは \\(42\\) です。", "答え：42人",
    "したがって、$x = 42$ となる。", "【答え】42", "よって、彼女は42ドルを稼ぎます。", "答えは42である。", "答えは 42 。", "정답은 $42$ 입니다.", "총 42개입니다.", "따라서 그녀는 42달러를 법니다.", "답: $42",
    "답은 42명입니다.", "그러므로 정답은 42이다.", "최종 답변: 42", "정답은 42 입니다", "따라서 x = 42이다.", "Ответ: $42$.", "Всего: 42 яблока.", "Ответ: 42 км/ч",
    "Итого: 42.", "Ответ: у Джанет 42 доллара.", "Значит, ответ 42.", "Она зарабатывает 42 доллара.", "Ответ: \\(42\\)", "Получаем 42.",
    "La réponse est donc $42$.", "Elle gagne 42 $ par jour.", "Réponse : 42 €", "Le résultat est 42.", "Au total, il y a 42 pommes.",
    "La réponse finale est $\\boxed{42}$.", "Il reste 42 euros à Marie.", "Réponse : elle gagne 42 euros.", "Die Antwort ist: **42**",
    "Antwort: 42 Äpfel", "Insgesamt hat sie 42 Euro.", "Das Ergebnis ist 42.", "Sie verdient 42 Dollar pro Tag.",
    "Antwort: Sie verdient 42 Dollar.", "Die Lösung lautet 42.", "Also ist x = 42.", "La respuesta es $42$ dólares.", "Gana 42 dólares al día.",
    "En total hay 42 manzanas.", "Respuesta: 42 manzanas", "Por lo tanto, x = 42.", "Respuesta: ella gana 42 dólares.", "El resultado es 42.",
    "La risposta è 42 euro.", "In totale ci sono 42 mele.", "Risposta: 42 km", "Il risultato è 42.", "A resposta é 42 reais.",
    "No total, são 42.", "Resposta: 42 maçãs", "O resultado é 42.", "The answer is a total of forty-two (42) eggs.", "Forty two (42) apples.",
    "The answer is 42 with a remaining budget of $3.", "{\"answer\": \"42\"}", "{\"answer\": 42, \"unit\": \"km\"}", "{\"answer\": \"42 km\"}",
    "```json\n{\"reasoning\": \"6*7\", \"final_answer\": 42}\n```", "✅ The answer is 42.", "✅ **42**", "The answer is 42 (forty-two).",
    "There are forty-two (42) of them.",
)
WORDS = {
    "北京": ("答案是北京。", "答案：北京", "正确答案是：北京。", "中国的首都是北京。答案：北京", "答案为“北京”。",),
    "東京": ("答えは東京です。", "正解は「東京」です。", "答え：東京", "答えは東京。", "日本の首都は？答えは東京になります。",),
    "서울": ("정답은 서울입니다.", "정답: 서울", "답은 '서울'입니다.", "정답은 **서울**입니다.",),
    "Москва": ("Ответ: Москва.", "Правильный ответ — Москва.", "Ответ: **Москва**",),
    "Paris": ("La réponse est Paris.", "Réponse : **Paris**", "La bonne réponse est « Paris ».", "{\"answer\": \"Paris\"}",),
    "Berlin": ("Die Antwort ist Berlin.", "Antwort: **Berlin**", "Die richtige Antwort lautet „Berlin“.", "Die Antwort lautet: Berlin",),
    "Madrid": ("La respuesta es Madrid.", "Respuesta: «Madrid»", "La respuesta correcta es: Madrid.",),
    "Roma": ("La risposta è Roma.", "Risposta: Roma",),
    "Lisboa": ("A resposta é Lisboa.", "Resposta: Lisboa.",),
}
# The letter is denied, or one of several.
NOT_CHOSEN = (
    "选项B是错误的。", "B选项错误，C选项正确。", "正确答案不是B，而是C。", "不选B", "答案不是B", "除了B都对。", "B和C都对。", "A或B", "选项B不对。", "B项不正确", "答案B错误", "B肯定不对", "答案：不是B",
    "答案可能是B，也可能是C", "答案：B/C", "答案：B、C", "选B或者C", "选BC", "答案：BC", "A、B、C、D", "选项：A. 巴黎 B. 伦敦", "故不选B。", "B不是正确答案。", "答案不应该是B。", "我不认为答案是B。",
    "答案并不是B。", "正解はBではなくCです。", "BではなくCが正解です。", "Bは不正解です。", "Bは正しくない。", "正解はBかCです。", "正解はBとCです。", "Bではない。", "答えはBとは限らない。", "答えはBではない。",
    "Bが正解ではない。", "정답은 B가 아니라 C입니다.", "B는 정답이 아닙니다.", "정답은 B 또는 C입니다.", "B가 정답이 아닙니다.", "정답은 B, C입니다.", "B는 오답입니다.", "정답이 B인지 모르겠습니다.",
    "Ответ не B, а C.", "Правильный ответ не B.", "Вариант B неверный.", "B — неправильный ответ.", "Ответ: B или C", "Ответ: B, C",
    "Ответ: не B", "B неверно.", "Я не думаю, что ответ B.", "Неправильный ответ: B", "La bonne réponse n'est pas B mais C.",
    "L'option B est incorrecte.", "La réponse B est fausse.", "Réponse : B ou C", "Réponse : pas B", "Ce n'est pas B.",
    "La réponse n'est ni B ni C.", "Mauvaise réponse : B", "La réponse est soit B soit C.", "Je ne pense pas que la réponse soit B.",
    "Die Antwort ist nicht B, sondern C.", "B ist falsch, C ist richtig.", "Antwort B ist falsch.", "Option B ist falsch.", "Antwort: B oder C",
    "Nicht B.", "Die Antwort ist weder B noch C.", "Falsche Antwort: B", "Ich glaube nicht, dass die Antwort B ist.",
    "Die richtige Antwort ist keine von A, B.", "Die Antwort ist entweder B oder C.", "B ist nicht richtig.", "Antwort: nicht B",
    "La respuesta no es B sino C.", "La opción B es incorrecta.", "Respuesta: B o C", "No es B.", "La respuesta no puede ser B.",
    "Respuesta incorrecta: B", "B no es correcta.", "No creo que la respuesta sea B.", "La respuesta es B y C.", "La risposta non è B ma C.",
    "L'opzione B è sbagliata.", "Risposta: B o C", "B non è corretta.", "La risposta B è errata.", "A resposta não é B, mas C.",
    "A alternativa B está incorreta.", "Resposta: B ou C", "B não é a resposta correta.", "A alternativa B é falsa.", "Não é a letra B.",
    "{\"answer\": \"not B\"}", "{\"answer\": \"B or C\"}", "{\"wrong\": \"B\"}", "{\"answer\": null, \"other\": \"B\"}", "❌ B", "✅ B ✅ C",
    "✅ B or C", "Based on this, not B.", "Based on this, A or B.",
)
# fmt: on
RIGHT, WRONG = {"number": "42", "choice": "B"}, {"number": "43", "choice": "C"}
RULES = {
    "number": (Answer(), Math()),
    "choice": (Answer(kind="choice"), Math(gold="maths"), Math()),
    "exact": (Answer(kind="exact"),),
}


def paid(kind: str, text: str, gold: str) -> list[bool]:
    """Whether the rules of a kind pay a text, one for each of them."""
    row = Row(None, text, None, {"answer": gold, "maths": rf"\text{{({gold})}}"})
    return [rule.score(row).value == 1.0 for rule in RULES[kind]]


def honest(kind: str, forms: Forms) -> list[str]:
    own = {"number": forms.numbers, "choice": forms.letters, "exact": ()}[kind]
    return [form.format(RIGHT.get(kind, forms.word)) for form in forms.stated] + list(own)


def test_honest_completions_of_ten_languages_are_paid():
    tried = refused = 0
    lost = []
    for language, forms in LANGUAGES.items():
        for kind in RULES:
            for text in honest(kind, forms):
                verdicts = paid(kind, text, RIGHT.get(kind, forms.word))
                tried += len(verdicts)
                refused += verdicts.count(False)
                if not all(verdicts):
                    lost.append((language, kind, text, verdicts))
    assert tried >= 218
    assert refused / tried <= 8 / 218, lost


def test_no_wrong_answer_in_these_forms_is_paid():
    found = []
    for language, forms in LANGUAGES.items():
        for kind in RULES:
            right = RIGHT.get(kind, forms.word)
            for text in honest(kind, forms):
                wrong = text.replace(right, WRONG.get(kind, "Zagreb")).replace("orty-two", "orty-three")
                if any(paid(kind, wrong, right)):
                    found.append((language, kind, wrong))
    assert found == []


def test_no_hedge_and_no_denial_is_paid():
    found = []
    for language, forms in LANGUAGES.items():
        for kind in RULES:
            right, wrong = RIGHT.get(kind, forms.word), WRONG.get(kind, "Zagreb")
            hedges = [
                hedge.format(*pair)
                for hedge in forms.hedges
                for pair in ((right, wrong), (wrong, right), (f"${right}$", f"${wrong}$"))
            ]
            texts = [form.format(hedge) for form in forms.stated for hedge in hedges]
            for text in (*texts, *(form.format(right) for form in forms.denied)):
                if any(paid(kind, text, right)):
                    found.append((language, kind, text, paid(kind, text, right)))
    assert found == []


def number_of(text: str, gold: str = "42") -> tuple[float | None, str]:
    verdict = Answer().score(Row(None, text, None, {"answer": gold}))
    return verdict.value, verdict.status


def test_a_json_object_counts_whole_or_at_the_end_and_several_answers_in_it_are_a_conflict(subtests):
    for text, expected in {
        '{"answer": "B", "answer": "C"}': (0.0, "conflict"),
        '{"answer": "B", "choice": "C"}': (0.0, "conflict"),
        '{"answer": "B", "final_answer": "b"}': (1.0, "ok"),
        '{"answer": "B or C"}': (0.0, "conflict"),
        '{"answer": ["B", "C"]}': (0.0, "no_answer"),
        '{"answer": "C"}\nSo it is B, not quite.': (0.0, "no_answer"),
        '{"first": {"answer": "C"}, "answer": "B"}': (1.0, "ok"),
        '{"first": {"answer": "B"}, "answer": "C"}': (0.0, "ok"),
        '{"answer": "B"': (0.0, "no_answer"),
        'As {"answer": "C"} I write\n{"answer": "B"}': (1.0, "ok"),
        'I choose C.\n```json\n{"answer": "B"}\n```\nThat is all.': (1.0, "ok"),
        '\\boxed{C} {"answer": "B"}': (0.0, "ok"),
        '\\boxed{C}\n{"answer": "B"}': (1.0, "ok"),
        '<think>{"answer": "B"}</think>\n{"answer": "C"}': (0.0, "ok"),
        '{"answer": ' * 9_000 + '"B"' + "}" * 9_000: (0.0, "no_answer"),
    }.items():
        with subtests.test(text=text[:60]):
            verdict = Answer(kind="choice").score(Row(None, text, None, {"answer": "B"}))
            assert (verdict.value, verdict.status) == expected


def test_digits_in_groups_are_one_number(subtests):
    for text in ("1 234", "1\u00a0234", "1\u202f234", "1\u2009234 euros", r"\boxed{1\,234}", "La réponse est 1 234."):
        with subtests.test(text=text):
            assert number_of(text, "1234") == (1.0, "ok")
            assert number_of(text, "234")[0] == number_of(text, "1")[0] == 0.0
    for text, value in (("1 234 567", "1234567"), ("12 34", "34"), ("2020 150", "150"), ("1 1/2", "3/2")):
        assert number_of(text, value) == (1.0, "ok")


def test_times_of_day_are_values_of_their_own(subtests):
    for gold, paid_texts, unpaid_texts in (
        (
            "7:00",
            ("7:00", "The answer is 7:00 in the morning.", r"\boxed{7:00}", "It starts at 7:00 a.m."),
            ("7", "700"),
        ),
        (
            "4:30 p.m.",
            ("4:30 PM", "So it is 4:30 pm.", "Answer: 16:30", "04:30 p.m."),
            ("4:30 a.m.", "4.5", "4:31 p.m."),
        ),
        ("16:30", ("The answer is 4:30 p.m. because of the train.",), ("16.5", "The answer is 4:30 or 5:30", "6:30")),
    ):
        for text in (*paid_texts, *unpaid_texts):
            with subtests.test(gold=gold, text=text):
                assert number_of(text, gold)[0] == float(text in paid_texts)
        assert number_of("The answer is not " + gold, gold)[0] == number_of(gold + " or 9:15", gold)[0] == 0.0
    for text, value in (("4:30 PM", 1.0), ("The answer is 4:30 p.m.", 1.0), ("4:30 am", 0.0), ("16:30", 1.0)):
        assert Answer(kind="exact").score(Row(None, text, None, {"answer": "4:30 p.m."})).value == value


def test_talk_of_an_answer_in_other_languages_announces_nothing():
    for text in (
        "答案是42。验证答案：6*7。",
        "答案是42。如果答案是7，就不对。",
        "Antwort: 42. Wenn die Antwort 7 ist: 7.",
        "Ответ: 42. Проверим ответ: 6 * 7.",
        "Respuesta: 42\nVerificamos la respuesta: 7",
        "\\boxed{42} 答案：7",
    ):
        assert number_of(text) == (1.0, "ok"), text
        assert number_of(text, "7")[0] == 0.0, text


SOLUTIONS = (
    "解答：首先，3*4=12。然后 12+30=42。所以一共42个。",
    "答：小明原来有12个苹果，又买了30个，所以现在有42个。",
    "Lösung:\n\n1. 3 * 4 = 12\n2. 12 + 30 = 42\n\nSie hat also 42 Äpfel.",
    "Lösung: Sie kauft 12 Äpfel.\nDann bekommt sie 30.\nInsgesamt hat sie 42 Äpfel.",
    "Réponse : Elle achète 12 pommes, puis 30 autres. Elle a donc 42 pommes.",
    "Respuesta: Primero, 3 * 4 = 12. Luego 12 + 30 = 42. Tiene 42 manzanas.",
    "La respuesta se obtiene sumando: 12 + 30 = 42.",
    "Ответ можно найти так: 3 * 4 = 12, и 12 + 30 = 42. Всего 42 яблока.",
    "Die Antwort ist nicht schwer zu finden: 12 + 30 = 42.",
    "解答：\n1日に12個、30日で…\n合計は42個です。",
    "答え：まず、3×4=12です。次に、12+30=42です。よって42個です。",
    "이 문제의 답은 다음과 같습니다.\n\n12+30=42\n\n따라서 42개입니다.",
    "Per trovare la risposta sommiamo 12 e 30: il totale è 42.",
    "Resposta: Primeiro, 3 * 4 = 12. Depois 12 + 30 = 42.",
)


@pytest.mark.parametrize("text", SOLUTIONS)
def test_a_word_for_answer_that_stands_before_a_solution_announces_nothing(text):
    row = Row(None, text, None, {"answer": "42"})
    assert [rule.score(row).value for rule in RULES["number"]] == [1.0, 1.0]
    assert number_of(text, "12")[0] == 0.0


def test_honest_completions_that_the_words_were_not_made_for_are_paid():
    tried = [("choice", text, "B") for text in LETTERS] + [("number", text, "42") for text in NUMBERS]
    tried += [("exact", text, word) for word, texts in WORDS.items() for text in texts]
    verdicts = {(text, kind): paid(kind, text, gold)[: 1 + (kind != "exact")] for kind, text, gold in tried}
    refused = [key for key, values in verdicts.items() for value in values if not value]
    assert sum(map(len, verdicts.values())) >= 436
    assert len(refused) / sum(map(len, verdicts.values())) <= 8 / 218, refused
    for kind, text, _ in tried:
        for other in {"choice": "ACD", "number": ("43", "4", "2", "7"), "exact": ("Zagreb",)}[kind]:
            assert not any(paid(kind, text, other)), (text, other)


@pytest.mark.parametrize("text", NOT_CHOSEN)
def test_a_letter_that_is_denied_or_one_of_several_is_not_paid(text):
    assert paid("choice", text, "B")[:2] == [False, False]


def test_the_parts_of_a_list_are_joined_by_any_languages_and():
    for text in ("答案是3和5。", "答案为 x=3 或 x=5。", "Ответ: 3 и 5", "Antwort: x = 3 oder x = 5", "答え：3と5"):
        assert Math().score(Row(None, text, None, {"answer": "3, 5"})).value == 1.0, text
        assert Math().score(Row(None, text, None, {"answer": "3"})).value == 0.0, text
