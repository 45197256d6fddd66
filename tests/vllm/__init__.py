"""What vLLM leaves to its caller, trap by trap. Skipped where it is not installed."""
