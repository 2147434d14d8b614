"""From gradients that have arrived to updated weights."""
