"""Cutting a batch into microbatches, and joining what they return and log, and their losses."""
