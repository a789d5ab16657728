"""Rules and preference pairs.

pairs    preference pairs from scored samples
choice   which samples of one prompt make pairs
filter   without faulty and contradicted rows
gaps     how far rules prefer the chosen side
reports  what both did, in counts and as tables
data     checked datasets, chunks, scores
"""
