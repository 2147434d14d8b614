"""The user's own code between layers: how calls are intercepted, and what such code sees."""
