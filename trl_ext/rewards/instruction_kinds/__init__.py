"""Test verifiable instructions: IFEval's 25 kinds and IFBench's 47 general ones, each by its id.

spec            the record of an instruction, and the readers of its arguments
splitting       sentences and words
wording         keywords, letters, case, single marks
length          numbers of words, sentences and paragraphs
content         postscript, placeholders, a repeated prompt, start and end
format          bullets, highlights, sections, JSON, title
language        the language of the response
counting        shares of words and sentences, names, numbers, pronouns
word_order      words beside each other, their letters and syllables
sentence_order  sentences and paragraphs beside each other
layout          lists, lines, quotation marks, brackets, emojis
copying         the request repeated, whole or in part
"""
