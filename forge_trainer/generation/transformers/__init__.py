"""Sampling from models of Hugging Face transformers: slots, a step at a time, on CPU or GPU."""
