"""Test the 25 kinds of verifiable instructions of IFEval (arXiv:2311.07911, table 4).

spec      the record of an instruction, and the readers of its arguments
wording   keywords, letters, case, commas
length    numbers of words, sentences and paragraphs
content   postscript, placeholders, a repeated prompt, start and end
format    bullets, highlights, sections, JSON, title
language  the language of the response
"""
