"""What a step is made of: the schedule, workers, transfers, the tape, the executor, microbatches, and how they wait."""
