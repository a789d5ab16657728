"""The kinds of verifiable instructions (arXiv:2311.07911).

spec      what an instruction is
words     keywords, case, commas
length    words, sentences, paragraphs
content   what must be there
format    bullets, sections, JSON, title
language  the language of the response
"""
