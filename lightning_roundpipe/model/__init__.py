"""The user's model as the engine sees it: its layers, their replicas, and loading a model from disk."""
