"""Actors: thin Monarch shells. An endpoint takes its turn, delegates, returns."""
