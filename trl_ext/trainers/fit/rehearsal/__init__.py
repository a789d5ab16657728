"""The longest micro-batch goes forward and backward before step 1, and leaves no trace."""
