"""What the machines of one job tell each other: tensors and JSON, and that they are alive."""
