"""What an exception says, and when an interrupt is raised."""
