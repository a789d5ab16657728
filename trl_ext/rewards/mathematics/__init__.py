"""Decide whether two answers are mathematically the same.

extract   the answer in a completion
bounds    sizes above which an answer is not judged
spelling  the many spellings of one thing
tokens    a text as tokens, one spelling for each meaning
units     the unit of an answer
form      list, tuple, set, interval, matrix, relation, words, expression
parse     one expression as a tree
size      how many digits the value of a tree may have
evaluate  the value of an expression
comparison  the strict comparison of two answers, and math-verify with bounded sizes
literal   whether an answer is written out, in the form that the task asks for
"""
