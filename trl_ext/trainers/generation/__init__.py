"""From rows of prompts to rollouts: which rows are drawn, who generates, which groups are left out."""
