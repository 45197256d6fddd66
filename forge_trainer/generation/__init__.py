"""Generation: prompts in, completions with log-probs out. Each backend keeps `Generator`."""
