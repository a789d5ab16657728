"""Rules as rewards: small, checkable, explainable, and without torch or TRL.

rule           Row, Verdict, Rule: what a rule reads and gives
ruleset        rules composed: the callable that TRL gets
composition    from verdicts to a total
shaping        scale, clip, rows, schedule
gates          which rule counts only behind which
bidding        can style outbid correctness
moments        running mean and standard deviation of totals
judge          rules meet rows: inline, in workers, from the cache
verdict_cache  verdicts that are kept
warnings       said once a process
rule_metrics   what a batch looked like to each rule
rows           from TRL's batch to rows
explanation    how a total comes about, as a table
config         rules from YAML and back

answer         right number, text or letter
maths          right by mathematical equivalence
code           right by tests, in a sandbox
procedural     right by reasoning-gym's verifiers
instructions   follows verifiable instructions
json_schema    JSON that fits a schema
tags           required tag pairs
pattern        a pattern, under a time limit
length         tokens, characters or words within bounds
cosine         a value that follows the length along a cosine
overlong       DAPO's punishment near the token limit
keywords       words that must and must not occur
repetition     repeated n-grams
grammar        signs of fluent prose, or LanguageTool's complaints
relevance      mentions of the prompt's content, less copies
language       the required language, by script or detector
call           a plain function as a rule

anchors        where a text announces its answer
numbers        exact numbers, read from text
choices        letters A to E, read from text
words          words, and text as it looks, in any script
procedural_guard  which answers a scorer may see

workers, sandbox, instruction_kinds, preference, auditing, mathematics: packages, each with its own list
"""

from trl_ext.rewards.auditing.audit import audit
from trl_ext.rewards.auditing.redteam import redteam
from trl_ext.rewards.judge import LARGEST
from trl_ext.rewards.preference.filter import filter_pairs
from trl_ext.rewards.preference.pairs import build_pairs
from trl_ext.rewards.rows import completion_text
from trl_ext.rewards.rule import Row, Rule, Verdict
from trl_ext.rewards.rules.answer import Answer
from trl_ext.rewards.rules.call import Call
from trl_ext.rewards.rules.code import Code
from trl_ext.rewards.rules.cosine import Cosine
from trl_ext.rewards.rules.grammar import Grammar
from trl_ext.rewards.rules.instructions import Instructions
from trl_ext.rewards.rules.json_schema import JsonSchema
from trl_ext.rewards.rules.keywords import Keywords
from trl_ext.rewards.rules.language import Language
from trl_ext.rewards.rules.length import Length
from trl_ext.rewards.rules.maths import Math
from trl_ext.rewards.rules.overlong import SoftOverlong
from trl_ext.rewards.rules.pattern import Pattern
from trl_ext.rewards.rules.procedural import Procedural
from trl_ext.rewards.rules.relevance import Relevance
from trl_ext.rewards.rules.repetition import Repetition
from trl_ext.rewards.rules.tags import Tags
from trl_ext.rewards.ruleset import RuleColumn, RuleSet
from trl_ext.rewards.totals.explanation import Explanation, Part
from trl_ext.rewards.totals.gates import GATE_OPENS_AT
from trl_ext.rewards.workers.limits import Limits
from trl_ext.rewards.workers.pool import WorkerPool

__all__ = [
    "GATE_OPENS_AT",
    "LARGEST",
    "Answer",
    "Call",
    "Code",
    "Cosine",
    "Explanation",
    "Grammar",
    "Instructions",
    "JsonSchema",
    "Keywords",
    "Language",
    "Length",
    "Limits",
    "Math",
    "Part",
    "Pattern",
    "Procedural",
    "Relevance",
    "Repetition",
    "Row",
    "Rule",
    "RuleColumn",
    "RuleSet",
    "SoftOverlong",
    "Tags",
    "Verdict",
    "WorkerPool",
    "audit",
    "build_pairs",
    "completion_text",
    "filter_pairs",
    "redteam",
]
