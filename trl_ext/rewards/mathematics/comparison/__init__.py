"""Decide whether an answer is the gold.

equal    the strict comparison of two answers, and golds that nothing can be compared with
gate     golds, answers and expressions that are too large, refused
library  math-verify behind the gate
"""
