"""Modules that run their tokens in tiles, so that their largest tensors are never whole."""
