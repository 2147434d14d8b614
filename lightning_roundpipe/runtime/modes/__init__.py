"""Other kinds of steps: manual optimization, evaluation, and steps that cut only the calls of the model."""
