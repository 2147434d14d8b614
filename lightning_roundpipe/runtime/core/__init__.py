"""The parts of a step: the schedule, workers, transfers, the tape, the layer executor, microbatches and their turns."""
