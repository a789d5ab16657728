"""Test verifiable instructions: IFEval's 25 kinds, IFTrain's 29, and the choice of RLVR-IFeval, each by its id.

spec        the class of an instruction, the readers of its arguments, sentences and words
ifeval      IFEval: words, length, content, form, language
iftrain     IFTrain: copies, first and last words, repeated words, positions, wrappings
"""
