"""Suites of what samples, and of the loops around it."""
