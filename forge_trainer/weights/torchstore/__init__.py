"""Weights in torchstore, across hosts."""
