"""What the first batches show of user code and layers, and the plan made from it."""
