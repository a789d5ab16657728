"""Test the instruction about the language of the response, by the rule Language."""

from functools import lru_cache
from typing import Any

from trl_ext.errors import RuleError, SupportError
from trl_ext.rewards.instruction_kinds.spec import instruction
from trl_ext.rewards.rule import Row
from trl_ext.rewards.rules.language import Language


@lru_cache(maxsize=64)
def language(code: Any) -> Language:
    """Return the rule for a language code; ValueError for an unknown one, or one that needs a missing package."""
    try:
        return Language(code)
    except (RuleError, SupportError) as error:
        raise ValueError(f"a language that can be recognised here: {error}") from error


@instruction("language:response_language", language=language)
def is_in_language(response: str, language: Language) -> bool:
    """True when nine tenths of the prose, outside code and formulas, are in the language."""
    return language.score(Row(None, response, None, {})).value == 1.0
