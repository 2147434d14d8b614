"""A batch cut into microbatches, and what they return, log and lose put together again."""
