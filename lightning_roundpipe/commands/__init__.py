"""Console commands that need no training run. Each file is one command; `options` is what they share."""
