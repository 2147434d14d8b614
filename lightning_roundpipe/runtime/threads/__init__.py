"""How the threads of a step wait, are given work, and are cancelled."""
