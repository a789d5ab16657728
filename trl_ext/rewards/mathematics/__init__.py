"""Decide whether two answers are mathematically the same.

extract   the answer in a completion
spelling  the many spellings of one thing
tokens    a text as tokens, one spelling for each meaning; sizes above which an answer is not judged
units     the unit of an answer
form      list, tuple, set, interval, matrix, relation, words, expression
tree      the nodes of an expression
parse     one expression as a tree
evaluate  the value of an expression, by a table of operations
equal     the strict comparison of two answers, by a table of (name, predicate); golds that only an equal text can meet
literal   whether an answer is written out, in the form that the task asks for, by tables of named rules
"""
