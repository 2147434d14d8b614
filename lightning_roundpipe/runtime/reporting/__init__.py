"""The events of a step, and the hints to the user."""
