"""Test verifiable instructions: IFEval's 25 kinds and IFBench's 47 general ones, each by its id.

spec        the record of an instruction, and the readers of its arguments
splitting   sentences and words
ifeval      IFEval's: words, length, content, form, language
counting    shares of words and sentences, names, numbers, pronouns, and the request repeated
word_order  words next to each other, their letters and syllables, sentences and paragraphs next to each other
layout      lists, lines, quotation marks, brackets, emojis
"""
