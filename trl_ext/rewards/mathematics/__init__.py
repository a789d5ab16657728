"""Decide whether two answers are mathematically the same.

extract   the answer in a completion
spelling  the many spellings of one thing
tokens    a text as tokens, one spelling for each meaning; sizes above which an answer is not judged
units     the unit of an answer
form      list, tuple, set, interval, matrix, relation, words, expression
parse     one expression as a tree
evaluate  the value of an expression, and how many digits it may have
equal     the strict comparison of two answers; golds that can be compared only with an equal text
literal   whether an answer is written out, in the form that the task asks for
"""
