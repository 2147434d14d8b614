"""Inputs, outputs and side effects of layer calls."""
