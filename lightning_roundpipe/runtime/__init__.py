"""The engine that runs a plan: microbatches, turns, the tape, workers, and copies between host and device."""
