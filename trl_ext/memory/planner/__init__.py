"""Find settings that fit the cards, and the fastest of them."""
