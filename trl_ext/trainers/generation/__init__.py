"""From rows of prompts to rollouts: what is drawn, who generates, what is left out."""
