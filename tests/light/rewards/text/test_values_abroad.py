"""Values that are written in words or in other signs than in English: the whole value is read, or none at all."""

# ruff: noqa: RUF001  Letters that look alike.
import pytest

from trl_ext.rewards import Answer, Math, Row, RuleSet

# What is written, its value, and a part of it that must not be paid.
READ = (
    *(("答案是3万元。", "30000", "3"), ("所以他一共赚了25万元。", "250000", "25"), ("答案为8千万。", "80000000", "8")),
    *(
        ("答案是负3", "-3", "3"),
        ("因此结果是-7。", "-7", "7"),
        ("答：温度是零下6度。", "-6", "6"),
        ("一共3打", "36", "3"),
    ),
    *(
        ("答案是大约40", "40", "4"),
        ("答案是5千克。", "5", "5000"),
        ("答案是5分之2", "0.4", "2"),
        ("答案是3个半小时", "3.5", "3"),
    ),
    *(("答えは3億円です。", "300000000", "3"), ("答えはマイナス3です。", "-3", "3"), ("答えは約20です", "20", "2")),
    *(
        ("정답은 3억 원입니다.", "300000000", "3"),
        ("정답은 마이너스 3입니다.", "-3", "3"),
        ("정답은 약 20입니다.", "20", "2"),
    ),
    *(("Ответ: 3 миллиона", "3000000", "3"), ("Ответ: 3 тыс.", "3000", "3"), ("Ответ: минус 3", "-3", "3")),
    *(("La réponse est 3 milliards d'euros.", "3000000000", "3"), ("Le résultat est moins 9.", "-9", "9")),
    *(("Die Antwort ist 3 Mio. Euro.", "3000000", "3"), ("Die Antwort ist minus 9 Grad.", "-9", "9")),
    *(("La respuesta es 3 millones.", "3000000", "3"), ("La respuesta es 4 y medio.", "4.5", "4")),
    *(
        ("La risposta è 3 mila.", "3000", "3"),
        ("La risposta è meno 3.", "-3", "3"),
        ("A resposta é 3 mil.", "3000", "3"),
    ),
    *(("A resposta é 3 milhões.", "3000000", "3"), ("The answer is 3 lakh.", "300000", "3")),
    *(("The answer is minus 3.", "-3", "3"), ("The answer is 3 hundred thousand.", "300000", "3")),
    *(("La réponse est 3 douzaines.", "36", "3"), ("Die Antwort ist 2,5 Millionen.", "2500000", "2.5")),
    *(("La respuesta es 3 cientos.", "300", "3"), ("Ответ: 3 десятка", "30", "3"), ("Ответ: всего 40", "40", "4")),
    # decimal commas, and groups with points
    *(
        ("Die Antwort ist 3,5.", "3.5", "35"),
        ("La réponse est 12,75 euros.", "12.75", "1275"),
        (r"\boxed{0{,}25}", "0.25", "25"),
    ),
    *(("Ответ: 0,125", "0.125", "125"), ("Der Preis beträgt 2,50 €.", "2.5", "250"), ("A: R$ 2,50", "2.5", "250")),
    *(("Die Antwort ist 1.234,56.", "1234.56", "1.23456"), ("Die Antwort ist 1.500.000 Euro.", "1500000", "1.5")),
    *(("答案是1,234", "1234", "1"), ("The answer is 3,125.", "3125", "3.125")),
)
# What is written has no value that is read, and this one is not it.
UNREAD = {
    "3": (
        *(
            "答案是3的倍数",
            "答案至少是3",
            "答案大于3",
            "答案是小于3的数",
            "答案接近3",
            "答案比10少3",
            "答案是3成",
            "3的平方",
            "答案是3多一点",
        ),
        *(
            "答えは3以上です",
            "答えは3より大きい",
            "答えは3の倍数です",
            "정답은 3보다 크다",
            "정답은 3의 배수입니다.",
            "3의 제곱",
        ),
        *("Ответ: больше 3", "Ответ: не менее 3", "3 в квадрате", "Die Antwort ist größer als 3.", "3 hoch 2"),
        *(
            "La réponse est supérieure à 3.",
            "La réponse est au moins 3.",
            "3 au carré",
            "La réponse est le double de 3.",
        ),
        *("La respuesta es al menos 3.", "La respuesta es la mitad de 3.", "3 al cuadrado", "La risposta è almeno 3."),
        *("A resposta é pelo menos 3.", "A resposta é o dobro de 3.", "因此边长为根号3", "5 minus 3", "答案是3万5千"),
    ),
    "5": ("答案是3万5千", "一共3万5"),
    "6": (
        "La réponse est 6 factorielle",
        "Die Antwort ist 6 Fakultät",
        "La risposta è 6 alla seconda",
        "答えは6を超えます",
    ),
    "1.2": ("A: 1,2,3", r"\boxed{1, 2}"),
    "40": ("Ответ: почти 40", "La réponse est près de 40.", "Die Antwort ist fast 40.", "La respuesta es casi 40."),
    "9": ("答案是9折", "Ответ: от 3 до 9", "Die Antwort ist zwischen 3 und 9."),
}
ROOTS = (
    *(
        "答案是根号3",
        "答案是3的平方根",
        "答えは3の平方根です",
        "答えはルート3です",
        "정답은 루트 3입니다.",
        "Ответ: корень из 3",
    ),
    *("La réponse est racine de 3.", "Die Antwort ist Wurzel aus 3.", "La respuesta es la raíz cuadrada de 3."),
    *("La risposta è radice di 3.", "A resposta é a raiz quadrada de 3.", "The answer is the square root of 3."),
)


def values(text: str, gold: str) -> list[float | None]:
    return [rule.score(Row(None, text, None, {"answer": gold})).value for rule in (Answer(), Math())]


@pytest.mark.parametrize(("text", "whole", "part"), READ)
def test_the_whole_value_is_read(text, whole, part):
    is_maths_blind = "R$" in text  # `Math` takes R for a variable.
    assert values(text, whole) == [1.0, 0.0 if is_maths_blind else 1.0]
    assert values(text, part) == [0.0, 0.0]


@pytest.mark.parametrize(("gold", "text"), [(gold, text) for gold, texts in UNREAD.items() for text in texts])
def test_what_cannot_be_read_is_no_answer_and_never_a_part(gold, text):
    assert values(text, gold) == [0.0, 0.0]


@pytest.mark.parametrize("text", ROOTS)
def test_a_root_in_words_is_read_by_math_and_its_radicand_by_none(text):
    assert values(text, r"\sqrt{3}")[1] == 1.0
    assert values(text, "3") == [0.0, 0.0]


@pytest.mark.parametrize("text", ["Die Antwort ist 1.234.", "La respuesta es 1,234.", "Ответ: 1.234"])
def test_where_two_readings_fit_the_gold_decides_nothing(text):
    for gold in ("1234", "1.234"):
        assert values(text, gold) == [None, None]
    assert values(text, "1") == values(text, "234") == [0.0, 0.0]


def test_a_rule_set_pays_the_value_and_leaves_out_what_is_undecided():
    rules = RuleSet([Answer()], on_unscored="warn")
    texts = ["答案是3万", "答案是3万", "Die Antwort ist 1.234."]
    rewards = rules(prompts=["?"] * 3, completions=texts, answer=["30000", "3", "1234"])
    assert rewards == [1.0, 0.0, None]
    rules.close()
