"""Decide whether an answer is the gold.

equal    strict comparison of two answers; golds that can be compared only with an equal text
gate     refusal of golds, answers and expressions that are too large
library  calls of math-verify
"""
