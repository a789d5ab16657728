"""From rollouts to a loss: what an optimizer step forwards, in which order, and how it goes backward."""
