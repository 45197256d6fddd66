"""Data: prompts and how answers to them are judged. Text only; no tokens, no model."""
