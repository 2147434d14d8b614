"""The user's own code between layers: how its layer calls are intercepted, and what it sees."""
