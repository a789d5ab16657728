"""Math in the train profile: what must earn nothing, and what strictness must not lose."""

import pytest

from trl_ext.rewards.base.rule import Row
from trl_ext.rewards.rules.maths import Math

pytest.importorskip("math_verify")


def value(text: str, gold: object, prompt: object = None, **fields: str) -> float | None:
    return Math(**fields).score(Row(prompt, text, None, {"answer": gold})).value


def box(answer: str) -> str:
    return f"So the answer is $\\boxed{{{answer}}}$."


HACKS = {
    # tautologies and chains
    "tautology": (box("5=3"), "3"), "chain of wrong equations": (box("1=2=3"), "3"),
    "unknown with two values": (box("x=5=3"), "3"), "sum that is wrong": (box("2+2=5"), "5"),
    "unknown equals itself": (box("x=x"), "x=5"), "zero equals zero for a line": (box("0=0"), "2x+3y=7"),
    "other unknown": (box("y=5"), "x=5"),
    # the task given back
    "equation instead of its solution": (box("2x+3=7"), "x=2"),
    "factored equation instead of its solutions": (box("(x-1)(x+2)=0"), "x=1,x=-2"),
    "term copied from the prompt": (box("(x+1)^2"), "x^2+2x+1", "Expand $(x+1)^2$."),
    "sum copied from the prompt": (box("37+48"), "85", "What is 37 + 48?"),
    "fraction copied from the prompt": (box(r"\frac{1}{4}"), "0.25", r"Write $\frac14$ as a decimal."),
    "root copied from a message": (
        box(r"\sqrt{50}"),
        r"5\sqrt2",
        [{"role": "user", "content": r"Simplify $\sqrt{50}$"}],
    ),
    # units
    "other unit": (box(r"3 \text{ m}^2"), r"3 \text{ cm}^2"),
    "length for an area": (box(r"3 \text{ cm}"), r"3 \text{ cm}^2"),
    "unit converted": (box(r"0.05 \text{ m}"), r"5 \text{ cm}"), "euro for dollar": (box("€18"), r"\$18"),
    "degrees for percent": (box(r"50^\circ"), r"50\%"), "million dropped": (box(r"3 \text{ million}"), "3"),
    "dozen dropped": ("The answer is $3 \\text{ dozen}$", "3"), "variable as unit": (box("5x"), "5"),
    "imaginary unit as unit": (box(r"5\text{i}"), "5"), "statement as unit": (box(r"5 \text{ is wrong}"), "5"),
    "negation as unit": (box(r"5 \text{ or not}"), "5"),
    # percent
    "fraction for percent": (box("0.5"), r"50\%"), "percent for fraction": (box(r"50\%"), "0.5"),
    "percent dropped twice": (box(r"0.5"), "50%"),
    # several answers
    "two boxes": (r"\boxed{3} or \boxed{4}", "4"),
    "two boxes far apart": (r"\boxed{3}" + " hm" * 50 + r" \boxed{4}", "4"), "list": (box("3, 4"), "3"),
    "list with or": (box(r"3 \text{ or } 4"), "3"), "plus minus": (box(r"\pm 3"), "3"),
    "superset": (box(r"\{1,2,3\}"), r"\{1,2\}"), "subset": (box(r"\{1\}"), r"\{1,2\}"),
    "set of one": (box(r"\{3\}"), "3"), "the same twice": (box("3, 3"), "3"),
    "two answer tags": ("<answer>3</answer><answer>4</answer>", "4"),
    "two announced numbers": ("The answer is 3 or 4.", "3"),
    "two announced formulas": ("The answer is $3$ or $4$.", "3"), "all options": (box("A, B, C, D"), r"\text{(B)}"),
    "two options": ("The answer is (A) or (B).", r"\text{(B)}"),
    # thoughts and hidden text
    "box in the thoughts": (r"<think>\boxed{3}</think> I do not know", "3"),
    "box in open thoughts": (r"<think>so \boxed{3}", "3"),
    "thoughts opened again": (r"<think>a</think><think>\boxed{3}", "3"),
    "nested thoughts, one still open": (r"<think><think>a</think> \boxed{3}", "3"),
    "thoughts opened in the prompt": (r"so \boxed{3}</think>", "3"),
    "HTML comment": (r"I do not know <!-- \boxed{3} -->", "3"),
    "HTML comment left open": (r"I do not know <!-- \boxed{3}", "3"),
    "LaTeX comment": ("I do not know\n% \\boxed{3}", "3"), "phantom": (box(r"\phantom{3}"), "3"),
    "comment in the box": (box("4 % 3"), "3"),
    # nothing there
    "empty": ("", "3"), "empty box": (box(""), "3"), "blank box": (box(r"\ \,"), "3"),
    "box not closed": (r"\boxed{3", "3"), "second box not closed": (r"\boxed{3} \boxed{3", "3"),
    "tag not closed": ("<answer>3", "3"), "negated answer": ("The answer is not 5.", "5"),
    "negated with apostrophe": ("The answer isn't 5", "5"),
    "denied box": (r"I do not think that it is \boxed{5}", "5"),
    "denied tag": ("It is anything but <answer>5</answer>", "5"),
    "denied announcement": ("I do not think that the answer is 5", "5"),
    "formula denied behind": (r"The answer is $\frac12$ is wrong", "0.5"),
    "attribute": ('<answer value="5"></answer>', "5"), "negated number": ("It is certainly not 5.", "5"),
    "negated formula": ("It does not equal $5$.", "5"), "negated box": ("The answer is not $\\boxed{5}$.", "5"),
    "negated tag": ("not <answer>5</answer>", "5"), "excluded number": ("<answer>anything but 5</answer>", "5"),
    "answer taken back": ("<answer>5 is wrong</answer>", "5"),
    "attribute without a name": ("<answer 5></answer>", "5"), "tag that closes itself": ('<answer value="5"/>', "5"),
    "box in a box that holds more": (r"\boxed{4 \boxed{5} 6}", "5"),
    "tag in a tag": ("<answer>4 <answer>5</answer> 6</answer>", "5"),
    "a thousand boxes in boxes": ("\\boxed{" * 1000 + "5" + "}" * 1000, "5"),
    # characters
    "Cyrillic letter for a digit": (box("\u0417"), "3"), "Arabic digit": (box("\u0663"), "3"),
    "bold digit": (box("\U0001d7d1"), "3"), "circled digit": (box("\u2462"), "3"),
    "superscript read as digit": (box("3\u00b2"), "32"), "superscript dropped": (box("3\u00b2"), "3"),
    "zero width space": (box("1\u200b3"), "13"), "right to left mark": (box("\u202e31"), "13"),
    "combining mark": (box("3\u0338"), "3"), "Cyrillic variable": (box("\u0445+1"), "x+1"),
    # near misses
    "near number": (box("3.0000001"), "3"), "very near number": (box("3." + "0" * 400 + "1"), "3"),
    "decimals of a third": (box("0.33"), r"\frac13"), "many decimals of a third": (box("0." + "3" * 500), r"\frac13"),
    "decimals of a root": (box("1.4142135623730951"), r"\sqrt2"),
    "decimals of pi": (box("3.141592653589793238462643383279502884197"), r"\pi"),
    "nearly an integer": (box(r"e^{\pi\sqrt{163}}"), "262537412640768744"),
    "tiny term added": (box("x+10^{-60}"), "x"), "division by zero": (box("1/0"), r"\infty"),
    # formulas that are broken or beyond reading
    "sum of nothing": (box(r"\log_2\sum_{i=1}^{3}"), "3"), "number behind an unknown command": (box(r"\foo 3"), "3"),
    "number in an unknown command": (box(r"\foo{3}"), "3"), "number before an unknown command": (box(r"3\foo"), "3"),
    "sum that is not this one": (box(r"\sum_{i=1}^{4} i"), "6"), "capital in a sum": (box(r"\sum_{i=1}^{3} X"), "3x"),
    "approximation": (box(r"3 \approx \pi"), "3"), "congruence": (box(r"3 \pmod 5"), "3"),
    "index of a number": (box("3_5"), "3"), "derivative": (box("3'"), "3"), "transpose": (box("3^T"), "3"),
    "fraction of nothing": (box(r"\frac{3}{}"), "3"), "unbalanced bracket": (box("(3"), "3"),
    # structure
    "fragment": (box("3"), r"3\sqrt{13}"), "last number of a gold": (box("13"), r"3\sqrt{13}"),
    "element of a tuple": (box("3"), r"\left(3, \frac{\pi}{2}\right)"), "base left out": (box("52"), "52_8"),
    "other base": (box("52_9"), "52_8"), "tuple for a set": (box("(1,2)"), r"\{1,2\}"),
    "set for a tuple": (box(r"\{1,2\}"), "(1,2)"), "list for a tuple": (box("1,2"), "(1,2)"),
    "tuple in another order": (box("(2,1)"), "(1,2)"), "closed for open": (box("[1,2]"), "(1,2)"),
    "half open for open": (box("[1,2)"), "(1,2)"), "inequality not strict": (box(r"x \geq 3"), "x > 3"),
    "inequality turned round": (box("x < 3"), "x > 3"), "inequality times minus one": (box("-x > -3"), "x > 3"),
    "matrix transposed": (box(r"\begin{pmatrix}1&3\\2&4\end{pmatrix}"), r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    "row for column": (box(r"\begin{pmatrix}1&2\end{pmatrix}"), r"\begin{pmatrix}1\\2\end{pmatrix}"),
    "determinant for matrix": (box(r"\begin{vmatrix}1&2\\3&4\end{vmatrix}"), r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    "upper case": (box("X+1"), "x+1"), "upper case imaginary unit": (box("2I"), "2i"),
    "absolute value dropped": (box("x"), "|x|"), "anagram": (box(r"\text{seat}"), r"\text{east}"),
    "anagram without text": (box("east"), "seat"), "product read as sum": (box("2(3)"), "5"),
    "mixed number run together": (box("11/2"), r"1\frac12"), "thousands run together": (box("(1,000)"), "1000"),
    "sign": (box("-3"), "3"), "infinity for minus infinity": (box(r"\infty"), r"-\infty"),
    "conjugate": (box("3-2i"), "3+2i"), "antiderivative without its constant": (box("x^2"), "x^2 + C"),
    # what a gold settles, and no more
    "closed interval for an open relation": (box("[1,2]"), "1 < x < 2"),
    "other interval for a relation": (box("(1,3)"), "1 < x < 2"),
    "union for and": (box(r"(-\infty,3)\cup(1,\infty)"), "x > 1, x < 3"),
    "one of two intervals": (box("(4,8]"), r"4 < m \leq 8 \text{ or } 10 \leq m < 12"),
    "equation for a number": (box("2x(1)=7"), "7"), "other name": (box("CD=4"), "AB=4"),
    "name without its value": (box("|AB|"), "|AB|=1"), "names in another order": (box("5, 4"), "AB=4, CD=5"),
    "pair in another order": (box("(2,5)"), "p=5, q=2"), "denial as a name": (box(r"\text{wrong: } 5"), "5"),
    "ratio turned round": (box("8:5"), "5:8"), "ratio as a product": (box("40"), "5:8"),
    "other time of day": (box("1:15"), "2:30"), "ratio without a part": (box("1:2"), "1:2:3"),
    "nearly the ratio": (box("0.62"), "5:8"),
    "neither side of an approximation": (box("0.3"), r"\frac13 \approx 0.33"),
    "approximation that is no rounding": (box(r"\frac13 \approx 0.5"), r"\frac13"),
    "approximation without its right side": (box(r"5 \approx"), "5"),
    "approximation of the wrong value": (box(r"3 \approx \pi"), r"\pi"),
    "fraction near a whole number": (box(r"\frac{19}{6}"), "3"),
    "fraction near a short decimal": (box(r"\frac{51}{100}"), "0.5"),
    "fraction near a long decimal": (box(r"\frac{46}{100}"), "0.458"),
    "decimal near a decimal": (box("0.4583"), "0.458"),
    "other fraction of a percentage": (box(r"\frac{3}{8}"), r"62.5\%"), "one sign of two": (box("3"), r"\{3, \pm 1\}"),
    "signs that belong together": (box(r"(\pm 1, \mp 2)"), "(1,2),(1,-2),(-1,2),(-1,-2)"),
    "other angle": (box(r"60^\circ"), r"\frac{\pi}{6}"), "angle without its sign": (box("30"), r"\frac{\pi}{6}"),
    "other function": (box("g(x)=x"), "f(x)=x"), "letter kept of another function": (box("f(x)=z"), "f(z)=z"),
    "other step of a period": (box(r"2n\pi"), r"x = k\pi"),
    "row for a vector": (box(r"\begin{pmatrix}1&2\end{pmatrix}"), "(1,2)"),
    "half open for a vector": (box(r"[1,2)"), r"\begin{pmatrix}1\\2\end{pmatrix}"),
    "set-builder of another relation": (box(r"\{x | x > 1\}"), r"\{x | x < 1\}"),
    "domain with an answer in it": (box(r"3 \text{ for all } 4"), "3"), "two bases": (box("52_8"), "52_9"),
    "decimal comma for another number": (box("1000,98"), "1000.99"), "list of the digits": (box("1000,99"), "1000"),
    "more solutions than asked for": (box("1, 2, 3"), "1, 2"), "fewer solutions, twice": (box("1, 1"), "1, 2"),
    "other accent": (box(r"\hat{x}"), r"\bar{x}"), "other minutes": (box("63.45"), r"63^\circ 45'"),
    "derivative for its function": (box("y"), "y'"), "number behind a letter": (box("x2"), "2x"),
    "number in what the gold computes": (box("32"), r"\log_2(32) = 5"), "number of an equation": (box("7"), "2x+3=7"),
    "other equal names": (box("A=C"), "A=B"), "not equal as a factorial": (box("2!=2"), "3"),
}  # fmt: skip


@pytest.mark.parametrize("hack", HACKS)
def test_a_hack_earns_nothing(hack):
    assert value(*HACKS[hack]) == 0.0


RIGHT = [
    ("0.5", r"\frac12"), ("1/2", r"\frac{1}{2}"), (r"\tfrac{1}{2}", "0.5"), (r"\dfrac12", r"\frac{1}{2}"),
    (r"\frac{2}{4}", r"\frac12"), (r"\frac43", r"\frac{4}{3}"), (r"\frac{270}7", r"\frac{270}{7}"),
    (r"\frac 59", r"\frac{5}{9}"), (r"\frac{-1}{2}", r"-\frac{1}{2}"), (r"\frac{1}{-2}", "-0.5"),
    (r"11\sqrt2", r"11\sqrt{2}"), (r"\sqrt{117}", r"3\sqrt{13}"), (r"\frac{1}{\sqrt3}", r"\frac{\sqrt{3}}{3}"),
    ("2^{1/2}", r"\sqrt{2}"), (r"\sqrt{3+2\sqrt2}", r"1+\sqrt{2}"), (r"\sqrt[3]{16}", r"2\sqrt[3]{2}"),
    ("3√13", r"3\sqrt{13}"), ("10{,}000", "10000"), (r"10,\!080", "10,080"), ("1,000", "1000"),
    ("11,111,111,100", r"11,\! 111,\! 111,\! 100"), ("5.00", "5"), (".5", "0.5"), ("-0", "0"), ("+3", "3"),
    ("\u22123", "-3"), ("\uff11\uff18", "18"), (r"6.72 \times 10^{-5}", ".0000672"), ("1.5e3", "1500"),
    ("2^{10}", "1024"), ("2^10", "1024"), (r"1\frac{1}{2}", "1.5"), ("1 1/2", r"\frac32"),
    (r"0.\overline{3}", r"\frac13"), ("(1,2)", r"\left( 1, 2 \right)"),
    (r"(3, \pi/2)", r"\left( 3, \frac{\pi}{2} \right)"), (r"\{2, 1\}", r"\{1,2\}"), ("-2, 1", "1,-2"),
    (r"1 \text{ and } -2", "1,-2"), (r"\{3,5,7\}", "3, 5, 7"), (r"x=1 \text{ or } x=-2", "1,-2"),
    (r"1+\sqrt{19}, 1-\sqrt{19}", r"1 \pm \sqrt{19}"), ("x=5", "5"), ("5", "x=5"), ("5=x", "x=5"),
    ("x = 2+3 = 5", "5"), ("f(x) = x^2+1", "x^2+1"), (r"x \in [1,2)", "[1,2)"), (r"1 \leq x < 2", "[1,2)"),
    ("x > 2", r"(2,\infty)"), ("3 < x", "x > 3"), (r"(2,+\infty)", r"(2,\infty)"),
    (r"(2,3)\cup(0,1)", r"(0,1) \cup (2,3)"), (r"\{\}", r"\emptyset"), (r"+\infty", r"\infty"),
    (r"\begin{bmatrix}-1/3\\2/3\end{bmatrix}", r"\begin{pmatrix} -\frac13 \\ \frac23 \end{pmatrix}"),
    (r"\begin{pmatrix}1&0.5\\0&1\end{pmatrix}", r"\begin{pmatrix} 1 & \frac12 \\ 0 & 1 \end{pmatrix}"),
    ("east", r"\text{east}"), (r"\text{East}", r"\text{east}"), ("Yes", r"\text{yes}"), ("No", r"\text{no}"),
    (r"\textbf{Evelyn}", r"\text{Evelyn}"), ("C", r"\text{(C)}"), ("(C)", r"\text{(C)}"),
    (r"\textbf{(C)}\ 12", r"\text{(C)}"), (r"2\pi", r"\pi \cdot 2"), ("2π", r"2\pi"), ("e^2", "e^{2}"),
    (r"\exp(2)", "e^2"), (r"\ln 8", r"3\ln 2"), (r"\frac{\cos x}{\sin x}", r"\cot x"), (r"90^\circ", "90"),
    ("90", r"90^\circ"), (r"90 \text{ degrees}", r"90^{\circ}"), ("90°", r"90^\circ"), (r"\$18", "18"),
    ("18 dollars", r"\$18"), (r"\$18.00", "18"), ("5", r"5 \text{ cm}"), (r"5 \text{ cm}", "5"),
    (r"5 \text{ square centimeters}", r"5 \text{ cm}^2"), (r"5 \text{ hours}", r"5\text{ hour}"), ("18 apples", "18"),
    (r"50\%", r"50\%"), ("50", r"50\%"), (r"3 \text{ million}", "3,000,000"), ("9i+6", "6+9i"),
    ("x^{2023}+1", "1+x^{2023}"),
    (r"\frac{1}{\sigma\sqrt{2\pi}}e^{-\frac{(x-\mu)^2}{2\sigma^2}}",
     r"\frac{1}{\sqrt{2\pi\sigma^2}}\exp(-\frac{(x-\mu)^2}{2\sigma^2})"),
    (r"\frac{(2n)!}{(n!)^2}", r"\binom{2n}{n}"), (r"\frac{a^2-b^2}{a-b}", "a+b"),
    (r"\frac{\ln x}{\ln 10}", r"\log_{10} x"), (r"\tan^{-1} 2", r"\arctan(2)"), ("x^2+2x+1", "(x+1)^2"),
    ("(b+2)(a+5)", "(a+5)(b+2)"), ("10x - 14y + 22z + 8 = 0", "5x - 7y + 11z + 4 = 0"),
    ("y = 2x + 3", "2x - y + 3 = 0"), ("4210_{5}", "4210_5"), (r"52_{\text{eight}}", "52_8"), ("2θ", r"2\theta"),
    ("x_1 + x_2", "x_{2} + x_{1}"), ("5.", "5"), ("$5$", "5"), (r"$5^{\circ} $.", r"5^\circ"), (r"\boxed{5}", "5"),
    # relations and intervals
    (r"x \geq 5", "x >= 5"), ("x<=2", r"x \leq 2"), ("x != 3", r"x \neq 3"), ("-x >= -1", "x <= 1"),
    ("(-793,10)", "-793 < a < 10"), ("(0,1)", "0<f(x)<1"), (r"[5,\infty)", r"x \geq 5"),
    ("(-1,1)", r"\{x|-1 < x < 1\}"), (r"\{x \in \mathbb{R} \mid x > 3\}", r"(3,\infty)"),
    (r"(4,8] \cup [10,12)", r"4 < m \leq 8 \text{ or } 10 \leq m < 12"),
    (r"(-\infty,-2] \cup \{1\}", r"a \leqslant -2 \text{ or } a = 1"), (r"(-\infty,3) \cup (3,\infty)", r"x \neq 3"),
    (r"(-\infty,\infty)", r"\mathbb{R}"), (r"\text{all real numbers}", r"(-\infty,\infty)"),
    # names
    ("1", "|AB|=1"), ("AB=4", "4"), (r"\frac{1}{\sqrt{6}}", r"\frac{NO}{BO}=\frac{1}{\sqrt{6}}"),
    ("11:21", "V_{1}:V_{2}=11:21"), ("4, 5", "AB=4,CD=5"), ("(5,2),(7,2)", "p=5,q=2;p=7,q=2"),
    ("(x, y, z) = (1, 2, 3)", "1,2,3"), ("T(10)=2, T(11)=4, T(12)=3", "2,4,3"),
    (r"\frac{\sqrt2}{2}", r"x=y=z=\frac{\sqrt2}{2}"), ("Paolo: 18, Qing: 14", "18, 14"), ("f(x)=x", "f(z)=z"),
    (r"n\pi", r"x = k\pi"), (r"f(x) = 1 \text{ for all } x \in \mathbb{Q}_{>0}", "f(x)=1"),
    (r"x = \frac{\pi}{2} + k\pi, k \in \mathbb{Z}", r"\frac{\pi}{2} + k\pi"), ("-0.1375", r"\bar{x}=-0.1375"),
    ("f'(x) = 2x", "2x"), ("0", r"\text{only }x=0"),
    # ratios, approximations, percent, angles
    (r"\frac{5}{8}", "5:8"), ("5 : 8", "5:8"), ("20:3", r"\frac{20}{3}"), (r"\frac34", r"1 : \frac43"),
    (r"\frac13", r"\frac13 \approx 0.33"), ("0.33", r"\frac13 \approx 0.33"),
    (r"x = \frac13 \approx 0.333", r"\frac13"), (r"x \approx 11", "11"), (r"\frac{84}{13}", "6.46"),
    (r"\frac58", r"62.5\%"), (r"30^\circ", r"\frac{\pi}{6}"),
    # lists, sets, vectors
    (r"\{-2, 1+\sqrt5, 1-\sqrt5\}", r"\{1\pm\sqrt5,-2\}"), (r"\{-2,-1,0,1,2\}", r"0, \pm 1, \pm 2"),
    (r"(\pm 1, 0)", "(1,0),(-1,0)"), ("(-7,16,5)", r"\begin{pmatrix}-7\\16\\5\end{pmatrix}"),
    (r"\langle 1,2 \rangle", "(1,2)"), ("(1,2),(3,4),(1,2)", "(3,4),(1,2)"),
    (r"\text{line segment and circle}", "line segment, circle"), (r"7 \text{ goats and } 4 \text{ toys}", "7,4"),
    # spellings
    (r"125\text{ miles}", "$125$ miles"), (r"2.5 \text{ m}", r"$2.5 \mathrm{~m}$"), ("70 miles per hour", "70"),
    (r"12^{\mathrm{th}}", "12"), ("15", "15th Day"), ("28 pct", r"28\%"), ("2*10^(-10)", r"2 \times 10^{-10}"),
    ("1 000", "1000"), ("1000,99", "1000.99"), (r"\frac{\bar{x}}{2}", r"\bar{x}/2"), ("63.75", r"63^\circ 45'"),
    ("12 min", r"12 \mathrm{~min}"), (r"\frac12", r"\sin 30^\circ"), ("1+(n-2)2^n", "(n-2) 2^{n}+1"),
    (r"-\frac13", "-1./3"), ("3920", r"3920 \mathrm{~N}-\mathrm{m}"), ("17.10", r"\approx 17.10 \mathrm{ft}"),
    ("90", r"\angle B E A_{1}=90"), ("5", r"\log_2(32) = 5"), ("r=5", r"\mathrm{r}=5"), ("B=A", "A=B"),
    ("0.111", "0,111"), (r"\left(\frac15,\frac16\right)", r"\\left(\\frac{1}{5},\\frac{1}{6}\\right)"),
    (r"\frac{1}{2}", "\x0crac{1}{2}"), ("x^2", "x<sup>2</sup>"), (r"\emptyset", r"\text{no solution}"),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "gold"), RIGHT)
def test_a_right_answer_is_right_in_another_spelling(answer, gold):
    assert value(f"Therefore \\boxed{{{answer}}}", gold) == 1.0


@pytest.mark.parametrize(
    ("gold", "right", "wrong"),
    [
        (
            r"\lfloor \frac{2n}{3} \rfloor + 1",
            r"1+\left\lfloor 2n/3\right\rfloor",
            r"\lfloor \frac{2n}{4} \rfloor + 1",
        ),
        (r"\lceil n/2\rceil+1", r"\left\lfloor \frac{n+1}{2}\right\rfloor + 1", r"\lfloor n/2 \rfloor + 1"),
        (r"\lfloor x \rfloor", r"\lfloor x+1 \rfloor - 1", "x"),
        (r"\lceil x \rceil", r"-\lfloor -x \rfloor", r"\lfloor x \rfloor + 1"),
        (r"\lfloor n/20 \rfloor", r"\lfloor \frac{2n}{40} \rfloor", r"\lfloor n/21 \rfloor"),
    ],
)
def test_a_rounded_variable_is_compared_at_many_points(gold, right, wrong):
    assert [value(box(answer), gold) for answer in (gold, right, wrong, "0")] == [1.0, 1.0, 0.0, 0.0]


def test_a_rounded_variable_beside_large_numbers_is_not_compared_at_points():
    gold = r"\lfloor n/1000 \rfloor"
    assert [value(box(answer), gold) for answer in (gold, "0", r"\lfloor n/999 \rfloor")] == [1.0, None, None]
    assert value(box(r"\lfloor n \rfloor"), "0") == 0.0
