"""The names under which a version is stored. No key is ever written twice.

In torchstore:
    weights/e0v12/model.norm.weight      a whole tensor, for any client
    weights/e0v12/MAPPING                so that `get_state_dict("weights/e0v12")` finds them all
    manifests.e0v12                      written last
    leases.e0v12.5f0c3a.17               reader 5f0c3a was there when it wrote its 17th beat
torchstore matches prefixes by whole dot-separated parts, so there the version comes before the
name. The pieces of a rank lie at weights.e0v12.r1.5f0c3a.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from forge_trainer.errors import AlreadyPublishedError, WeightsError
from forge_trainer.pieces import WeightsVersion

MANIFESTS = "manifests"
WEIGHTS = "weights"
LEASES = "leases"


def pieces_prefix(version: WeightsVersion, rank: int | None = None) -> str:
    """Of all pieces of the version, or of those of a rank."""
    return f"{WEIGHTS}.{version}" + ("" if rank is None else f".r{rank}")


def tensor_key(version: WeightsVersion, name: str) -> str:
    """Of a whole tensor by its Hugging Face name, as docs/trainer.md tells users of torchstore."""
    return f"{WEIGHTS}/{version}/{name}"


def mapping_key(version: WeightsVersion) -> str:
    """Of the names of all tensors, which torchstore's `get_state_dict` asks for."""
    return tensor_key(version, "MAPPING")


def manifest_key(version: WeightsVersion) -> str:
    return f"{MANIFESTS}.{version}"


def leases_prefix(version: WeightsVersion) -> str:
    return f"{LEASES}.{version}"


def lease_key(version: WeightsVersion, reader: str, beat: int) -> str:
    return f"{leases_prefix(version)}.{reader}.{beat}"


def version_of(key: str) -> WeightsVersion:
    """The version that a key, or a file called like one, belongs to."""
    match = re.fullmatch(r"(?:\w+\.)?e(\d+)v(\d+)(?:\..*)?", key)
    if match is None:
        raise ValueError(f"{key!r} names no weights version")
    return WeightsVersion(int(match[1]), int(match[2]))


def published_already(version: WeightsVersion) -> AlreadyPublishedError:
    """The error for a second manifest of a version."""
    return AlreadyPublishedError(f"weights {version} exist already; they stay as they are")


def missing(version: WeightsVersion | None, held: Sequence[WeightsVersion]) -> WeightsError:
    """The error for a version that cannot be read; None is the newest."""
    if version is None:
        return WeightsError("no weights are published yet")
    return WeightsError(
        f"weights {version} do not exist; held: {[str(version) for version in held]}"
    )
