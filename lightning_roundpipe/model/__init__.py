"""The user's model as the engine sees it: its layers, their copies, and loading one from disk."""
