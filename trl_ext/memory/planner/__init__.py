"""Which settings fit the cards, and which of them are the fastest."""
