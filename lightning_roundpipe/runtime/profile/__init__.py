"""The first batches: what they show of user code and layers, and the plan that follows."""
