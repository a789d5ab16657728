"""Rules as rewards: small, checkable, explainable, and without torch or TRL."""

from trl_ext.rewards.auditing.audit import audit, test
from trl_ext.rewards.auditing.redteam import redteam
from trl_ext.rewards.base.rows import completion_text
from trl_ext.rewards.base.rule import Row, Rule, Verdict
from trl_ext.rewards.instruction_kinds.instructions import Instructions
from trl_ext.rewards.isolation.workers.limits import Limits
from trl_ext.rewards.isolation.workers.pool import WorkerPool
from trl_ext.rewards.pairs import filter_pairs
from trl_ext.rewards.rules.answer import Answer
from trl_ext.rewards.rules.async_rule import AsyncRule
from trl_ext.rewards.rules.call import Call
from trl_ext.rewards.rules.code import Code
from trl_ext.rewards.rules.grammar import Grammar, LanguageTool
from trl_ext.rewards.rules.json_match import JsonMatch
from trl_ext.rewards.rules.json_schema import JsonSchema
from trl_ext.rewards.rules.judge import Judge
from trl_ext.rewards.rules.keywords import Keywords
from trl_ext.rewards.rules.language import Language
from trl_ext.rewards.rules.length import Length
from trl_ext.rewards.rules.maths import Math
from trl_ext.rewards.rules.pattern import Pattern
from trl_ext.rewards.rules.relevance import Relevance
from trl_ext.rewards.rules.remote import Remote
from trl_ext.rewards.rules.repetition import Repetition
from trl_ext.rewards.rules.rubric import Rubric
from trl_ext.rewards.rules.tags import Tags
from trl_ext.rewards.ruleset import RuleColumn, RuleSet
from trl_ext.rewards.totals.composition import GATE_OPENS_AT, Explanation, Part
from trl_ext.rewards.totals.scorer import LARGEST

__all__ = [
    "GATE_OPENS_AT", "LARGEST", "Answer", "AsyncRule", "Call", "Code", "Explanation",
    "Grammar", "Instructions", "JsonMatch", "JsonSchema", "Judge", "Keywords", "Language", "LanguageTool", "Length",
    "Limits", "Math", "Part", "Pattern", "Relevance", "Remote", "Repetition", "Row", "Rubric", "Rule", "RuleColumn",
    "RuleSet", "Tags", "Verdict", "WorkerPool", "audit", "completion_text", "filter_pairs", "redteam", "test",
]  # fmt: skip
