"""Weights in mapped files that all processes of one host see."""
