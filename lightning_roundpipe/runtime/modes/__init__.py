"""Steps of other kinds: manual optimization, evaluation, and model calls in parts."""
