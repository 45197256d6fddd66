"""The names under which a version is stored. No key is ever written twice.

torchstore matches prefixes by whole dot-separated parts, so the version comes before the name:
    weights.e0v12.r1.model.norm.weight      piece of rank 1
    manifests.e0v12                         written last
"""

from __future__ import annotations

import re

from forge_trainer.types import WeightsVersion

MANIFESTS = "manifests"


def piece_key(version: WeightsVersion, rank: int, name: str) -> str:
    return f"{pieces_prefix(version)}.r{rank}.{name}"


def pieces_prefix(version: WeightsVersion) -> str:
    return f"weights.{version}"


def manifest_key(version: WeightsVersion) -> str:
    return f"{MANIFESTS}.{version}"


def version_of_manifest(key: str) -> WeightsVersion:
    """The version a manifest's key names."""
    match = re.fullmatch(rf"{MANIFESTS}\.e(\d+)v(\d+)", key)
    if match is None:
        raise ValueError(f"{key!r} is not a manifest key")
    return WeightsVersion(int(match[1]), int(match[2]))
