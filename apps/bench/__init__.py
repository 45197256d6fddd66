"""Benchmarks: every claim about speed or memory is a ratio measured in one run."""
