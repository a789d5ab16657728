"""Rules as rewards: small, checkable, explainable, and without torch or TRL.

rule         Row, Verdict, Rule: what a rule reads and gives
answer       right number, text or letter
anchors      where a text announces its answer
numbers      exact numbers, read from text
choices      letters A to E, read from text
tags         required tag pairs
pattern      a pattern, under a time limit
cosine       a value that follows the length along a cosine
overlong     DAPO's punishment near the token limit
grammar      signs of fluent prose, or LanguageTool's complaints
relevance    mentions of the prompt's content, less copies
language     the required language, by script or detector
length       tokens, characters or words within bounds
keywords     words that must and must not occur
repetition   repeated n-grams
words        where a word ends, in any script
call         a plain function as a rule
ruleset      rules composed: weights, gates, clip; the callable that TRL gets
gates        which rule counts only behind which
rows         from TRL's batch to rows
explanation  how a total comes about, as a table
config       rules from YAML and back
pairs        preference pairs from scored samples
pair_choice  which samples of one prompt make pairs
pair_filter  preference pairs without faulty and contradicted rows
pair_gaps    how far rules prefer the chosen side
pair_reports what both did, in counts and as tables
pair_data    what both share: checked datasets, chunks, scores
"""

from trl_ext.rewards.answer import Answer
from trl_ext.rewards.call import Call
from trl_ext.rewards.cosine import Cosine
from trl_ext.rewards.explanation import Explanation, Part
from trl_ext.rewards.gates import GATE_OPENS_AT
from trl_ext.rewards.grammar import Grammar
from trl_ext.rewards.judge import LARGEST
from trl_ext.rewards.keywords import Keywords
from trl_ext.rewards.language import Language
from trl_ext.rewards.length import Length
from trl_ext.rewards.limits import Limits
from trl_ext.rewards.overlong import SoftOverlong
from trl_ext.rewards.pair_filter import filter_pairs
from trl_ext.rewards.pairs import build_pairs
from trl_ext.rewards.pattern import Pattern
from trl_ext.rewards.relevance import Relevance
from trl_ext.rewards.repetition import Repetition
from trl_ext.rewards.rows import completion_text
from trl_ext.rewards.rule import Row, Rule, Verdict
from trl_ext.rewards.ruleset import RuleColumn, RuleSet
from trl_ext.rewards.tags import Tags

__all__ = [
    "GATE_OPENS_AT",
    "LARGEST",
    "Answer",
    "Call",
    "Cosine",
    "Explanation",
    "Grammar",
    "Keywords",
    "Language",
    "Length",
    "Limits",
    "Part",
    "Pattern",
    "Relevance",
    "Repetition",
    "Row",
    "Rule",
    "RuleColumn",
    "RuleSet",
    "SoftOverlong",
    "Tags",
    "Verdict",
    "build_pairs",
    "completion_text",
    "filter_pairs",
]
