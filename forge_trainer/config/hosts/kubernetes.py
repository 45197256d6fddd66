"""What is asked of Kubernetes for each host of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import model_validator

from ..section import Folder, Section

WORKER = "worker"
"""The container in which Monarch's worker runs; a pod may have others beside it."""
SHARED_MEMORY = "/dev/shm"


class KubernetesConfig(Section):
    """Pods of the Monarch operator (monarch.pytorch.org), one per host."""

    namespace: str
    image: str | None = None
    """A container image with forge_trainer in the Python environment of the controller. None takes
    that of the container `worker` in pod_template."""
    resources: dict[str, str] = {}
    """Requested for each pod, such as {"nvidia.com/gpu": "8"}."""
    shared_memory_size: str | None = None
    """Of /dev/shm in each pod, such as 64Gi, out of its memory. None is what the cluster gives,
    often 64 MB, which NCCL between GPUs of one host soon fills."""
    labels: dict[str, str] = {}
    """Of the MonarchMesh."""
    pod_template: Folder | dict[str, Any] | None = None
    """What else pods shall have, as Kubernetes writes it (metadata, spec), or the YAML file that
    holds it: volumes, tolerations, a service account, other containers. To the container named
    `worker` the command is added."""

    @property
    def template(self) -> dict[str, Any]:
        """The pod template as a mapping, read from its file; empty if none is given."""
        given = self.pod_template
        if isinstance(given, str):
            given = _read(Path(given))
        return given or {}

    @property
    def worker(self) -> dict[str, Any]:
        """What the template says of the container `worker`."""
        return next((one for one in _containers(self.template) if one.get("name") == WORKER), {})

    @property
    def worker_image(self) -> str:
        return self.image or str(self.worker["image"])

    @model_validator(mode="after")
    def template_is_one_of_pods(self) -> Self:
        template = self.template
        for key in template:
            if key not in ("metadata", "spec"):
                raise ValueError(
                    f"pod_template: {key!r} is not metadata or spec, which a pod template has; "
                    "what describes pods (containers, volumes, ...) belongs beneath spec"
                )
        names = [container.get("name") for container in _containers(template)]
        if names and names.count(WORKER) != 1:
            raise ValueError(
                f"pod_template: one container must be named {WORKER}, for it gets the worker's "
                f"command; there are {names}"
            )
        return self

    @model_validator(mode="after")
    def template_and_options_say_things_once(self) -> Self:
        worker = self.worker
        for key in ("command", "args"):
            if key in worker:
                raise ValueError(
                    f"pod_template: container {WORKER} has its own {key}, but Monarch's worker is "
                    "what it runs; leave it out"
                )
        for key in ("image", "resources"):
            if key in worker and getattr(self, key):
                raise ValueError(
                    f"{key} is given, and {key} of container {WORKER} in pod_template; give one"
                )
        if not self.image and "image" not in worker:
            raise ValueError("image is missing; give it, or that of pod_template's worker")
        paths = [mount.get("mountPath") for mount in worker.get("volumeMounts", ())]
        if self.shared_memory_size is not None and SHARED_MEMORY in paths:
            raise ValueError(
                f"shared_memory_size is given, and pod_template mounts {SHARED_MEMORY}; give one"
            )
        return self


def _containers(template: Mapping[str, Any]) -> list[dict[str, Any]]:
    """ValueError for what cannot be a list of them."""
    spec = template.get("spec") or {}
    found = spec.get("containers") or [] if isinstance(spec, dict) else None
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise ValueError("pod_template: spec.containers must be a list of mappings")
    return found


def _read(file: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(file.read_text())
    except OSError as error:
        raise ValueError(f"pod_template: cannot read {file}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"pod_template: {file} is not YAML: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"pod_template: {file} holds no mapping")
    return found
