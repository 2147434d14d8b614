"""Times and memory of a model on a machine, from shapes and rates, without weights or a GPU; and the plan that fits."""
