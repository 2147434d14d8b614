"""Notes on exceptions, and deferral of interrupts."""
