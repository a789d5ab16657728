"""The score of a completion: rules and reward models, and how they are added up."""
