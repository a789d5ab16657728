"""How answers are read out of completions: anchors, numbers, choices, words, boxes."""
