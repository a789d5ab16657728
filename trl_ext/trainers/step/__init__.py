"""From rollouts to a loss: the forwards of an optimizer step, their order and their backwards."""
