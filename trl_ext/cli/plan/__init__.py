"""`trl-ext plan`: settings that fit the cards."""
