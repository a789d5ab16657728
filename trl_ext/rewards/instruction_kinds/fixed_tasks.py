"""Test the fixed tasks of IFBench (`custom:`): the instruction names the task, and its answer is known."""

import csv
import io
import re
import unicodedata
from datetime import date
from itertools import pairwise

from trl_ext.rewards.instruction_kinds.spec import Instruction
from trl_ext.rewards.instruction_kinds.splitting import bare_words, sentences

_NUMBER = re.compile(r"\d+")
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_QUESTION = re.compile(r"^[ \t#*_]*Question\b[ \t]*\d*[ \t]*[.):;*_]*", re.MULTILINE)
_CHOICE = re.compile(r"[ \t*_-]*[(]?[A-Ea-e][.)][ \t]*\S")
_NUM_AFRICAN = 52  # The lists that count 54 countries and those that leave out islands both have more.
_CAPITALS = (
    "Reykjavik Helsinki Oslo Tallinn Stockholm Riga Moscow Copenhagen Vilnius Minsk Dublin Berlin Amsterdam Warsaw "
    "London Brussels Prague Luxembourg Paris Vienna Bratislava Budapest Vaduz Chisinau Bern Ljubljana Zagreb"
).split()
_CITY = ["ID", "Country", "City", "Year", "Count"]
_PRODUCT = ["ProductID", "Category", "Brand", "Price", "Stock"]
_STUDENT = ["StudentID", "Subject", "Grade", "Semester", "Score"]


def are_multiples(response: str) -> bool:
    """True when the numbers are 14, 21, 28, 35, 42, 49, and there are no others."""
    return _NUMBER.findall(response) == ["14", "21", "28", "35", "42", "49"]


def are_questions(response: str) -> bool:
    """True for 4 stretches that start with "Question", each longer than the last, with 5 lettered options each."""
    head, *questions = _QUESTION.split(response.strip())
    lengths = []
    for lines in (question.strip().split("\n") for question in questions):
        choices = [place for place, line in enumerate(lines) if _CHOICE.match(line)]
        if len(choices) != 5:
            return False
        lengths.append(len(" ".join(line.strip() for line in lines[: choices[0]])))
    return not head and len(lengths) == 4 and all(left < right for left, right in pairwise(lengths))


def are_countries_backwards(response: str) -> bool:
    """True for at least 52 lines from "Zimbabwe" on, in reverse alphabetical order."""
    lines = [line.strip(" \t0123456789.,;:)*_-") for line in _ascii(response).split("\n")]
    lines = [line for line in lines if line]
    start = next((place for place, line in enumerate(lines) if "Zimbabwe" in line), len(lines))
    found = lines[start:]
    return len(found) >= _NUM_AFRICAN and all(left >= right for left, right in pairwise(found))


def _ascii(text: str) -> str:
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()


def says_eagle_backwards(response: str) -> bool:
    """True for one sentence with "eagle bald", so that its words read backwards name the bald eagle."""
    return "eagle bald" in " ".join(bare_words(response.lower())) and len(sentences(response)) == 1


def spells_eagle_backwards(response: str) -> bool:
    """True when "elgae dlab" occurs, in any case."""
    return "elgae dlab" in response.lower()


def goes_through_alphabet(response: str) -> bool:
    """True for 26 sentences that start with a, b, c and so on to z."""
    initials = "".join(sentence.lstrip(" \t\n\"'*_")[:1].lower() for sentence in sentences(response))
    return initials == "abcdefghijklmnopqrstuvwxyz"


def are_capitals(response: str) -> bool:
    """True for the capitals of Europe north of 45 degrees, from north to south, divided by commas."""
    return [name.strip(" \t\n.") for name in _ascii(response).split(",")] == _CAPITALS


def _table(response: str, delimiter: str) -> list[list[str]]:
    """Return the rows of a table, less blank lines; none for a text that is no table."""
    try:
        rows = csv.reader(io.StringIO(response.strip()), delimiter=delimiter, skipinitialspace=True, strict=True)
        return [row for row in rows if row]
    except csv.Error:
        return []


def is_city_table(response: str) -> bool:
    """True for CSV with the columns ID, Country, City, Year, Count and 7 rows."""
    head, *rows = _table(response, ",") or [[]]
    return head == _CITY and len(rows) == 7 and all(len(row) == 5 for row in rows)


def is_product_table(response: str) -> bool:
    """True for CSV with the five columns asked for and 14 rows, and a special character in a quoted field."""
    head, *rows = _table(response, ",") or [[]]
    quoted = re.findall(r'(?:^|,)[ \t]*"((?>[^"]|"")*)"', response, re.MULTILINE)
    special = any(not char.isalnum() and not char.isspace() for field in quoted for char in field)
    return head == _PRODUCT and len(rows) == 14 and all(len(row) == 5 for row in rows) and special


def is_student_table(response: str) -> bool:
    """True for the five columns asked for and 3 rows, divided by tabs, each field in double quotation marks."""
    table = _table(response, "\t")
    fields = [field.strip() for line in response.strip().split("\n") if line.strip() for field in line.split("\t")]
    quoted = [field for field in fields if len(field) > 1 and field[0] == field[-1] == '"']
    # The names of the columns may stand without.
    return (
        len(table) == 4
        and table[0] == _STUDENT
        and all(map(len, table))
        and all(len(row) == 5 for row in table)
        and quoted[-15:] == fields[-15:]
    )


def are_dates(response: str) -> bool:
    """True for dates YYYY-MM-DD, divided by commas, in Napoleon's life (1769 to 1821)."""
    return all(map(_is_date, response.strip().rstrip(".").split(",")))


def _is_date(part: str) -> bool:
    if not _DATE.fullmatch(part.strip()):
        return False
    try:
        return 1769 <= date.fromisoformat(part.strip()).year <= 1821
    except ValueError:
        return False


INSTRUCTIONS = (
    Instruction("custom:multiples", are_multiples),
    Instruction("custom:mcq_count_length", are_questions),
    Instruction("custom:reverse_newline", are_countries_backwards),
    Instruction("custom:word_reverse", says_eagle_backwards),
    Instruction("custom:character_reverse", spells_eagle_backwards),
    Instruction("custom:sentence_alphabet", goes_through_alphabet),
    Instruction("custom:european_capitals_sort", are_capitals),
    Instruction("custom:csv_city", is_city_table),
    Instruction("custom:csv_special_character", is_product_table),
    Instruction("custom:csv_quotes", is_student_table),
    Instruction("custom:date_format_list", are_dates),
)
