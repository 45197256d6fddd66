"""GRPO: sample groups of completions, judge them, train on what was better than its group."""
