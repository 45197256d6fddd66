"""A machine that waits for a run to use it."""
