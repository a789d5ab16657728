"""When are two answers the same, mathematically.

extract   where a completion states its answer
boxes     contents of boxes and answer tags, in one pass
gold      the right answer, as a gold column spells it
prompt    an answer that is the task given back
limits    how large an answer may be
gate      what is not judged because of its size
tokens    a text as tokens, one spelling for each meaning
spelling  the many spellings of one thing
units     the unit of an answer
form      list, tuple, set, interval, matrix, relation, words, expression
parse     one expression as a tree
tree      trees of expressions
size      how many digits an expression is worth
values    what an expression is worth
equal     are two answers the same, strictly
library   math-verify behind limits
"""
