"""What a step reports, and what the user is told."""
