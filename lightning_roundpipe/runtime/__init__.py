"""The engine that walks a plan: microbatches, turns, the tape, workers, and what travels between host and device."""
