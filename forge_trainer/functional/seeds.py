"""Seeds that follow from what they are for, so that order and number of others change nothing."""

from __future__ import annotations

from hashlib import blake2b


def request_seed(run_seed: int, *, group_id: int, index: int, turn: int) -> int:
    """Of the request for the `turn`-th message of the `index`-th episode of a group.

    An episode that is begun anew asks with the same seeds.
    """
    return _hashed(f"request/{run_seed}/{group_id}/{index}/{turn}")


def opening_seed(run_seed: int, *, group_id: int) -> int:
    """Of the environments of a group, which begin alike."""
    return _hashed(f"opening/{run_seed}/{group_id}")


def asked_seed(run_seed: int, *, group_id: int, index: int, prompt: bytes, repetition: int) -> int:
    """Of a request that an episode's agent makes, by what it asks, and how often it has asked that.

    Whether it has several conversations at one time, and which of them is faster, changes nothing.
    """
    digest = blake2b(prompt, digest_size=16).hexdigest()
    return _hashed(f"asked/{run_seed}/{group_id}/{index}/{digest}/{repetition}")


def _hashed(what: str) -> int:
    """The first 63 bits of BLAKE2b, the same on every machine and in every version of Python."""
    return int.from_bytes(blake2b(what.encode(), digest_size=8).digest()) >> 1
