"""Turns gradients on the host into updated weights."""
