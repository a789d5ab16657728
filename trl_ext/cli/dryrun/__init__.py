"""`trl-ext dryrun RECIPE`: a recipe's memory, counted on fake tensors."""
