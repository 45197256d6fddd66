"""Pods for `launch.kind: kubernetes`: Monarch's KubernetesJob, with the user's own template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forge_trainer.config import LaunchConfig
from forge_trainer.errors import ConfigError


def kubernetes_job(launch: LaunchConfig, run: str, **options: Any) -> Any:
    """A MonarchMesh of pods per role; not created yet. `options` are of Monarch's KubernetesJob.

    `run` ends the names of meshes: one of the same name would be taken over from another run.

    Raises:
        ConfigError: the package `kubernetes` is not installed.
    """
    try:
        from monarch._src.job.kubernetes import ImageSpec, KubernetesJob
    except RuntimeError as error:
        raise ConfigError(
            "launch.kind: kubernetes needs a package; install it with `uv sync --extra kubernetes`"
        ) from error
    pods = launch.kubernetes
    assert pods is not None, "LaunchConfig has looked"
    job = KubernetesJob(pods.namespace, timeout=int(launch.start_timeout_s), **options)
    image = ImageSpec(
        pods.worker_image,
        dict(pods.resources) or None,
        shared_memory_size=pods.shared_memory_size,
    )
    for role, number in launch.hosts.items():
        labels = dict(pods.labels) or None
        job.add_mesh(f"{role}{run}", number, image_spec=image, labels=labels)
    _complete_pods(job, pods.template)
    return job


def _complete_pods(job: Any, template: Mapping[str, Any]) -> None:
    """Let the job's pods have what the template says.

    Monarch 0.7.0 takes either an image or a whole template, to which it adds nothing: no command,
    and no identities for its workers. What it makes of the image is therefore put into the
    template.
    """
    from kubernetes import client

    worker_pod = job._build_worker_pod_template

    def build(*args: Any) -> dict[str, Any]:
        ours = client.ApiClient().sanitize_for_serialization(worker_pod(*args))
        return completed(template, ours)

    job._build_worker_pod_template = build


def completed(template: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """The template of a pod with our worker in it; where both say something, ours counts."""
    spec = template.get("spec") or {}
    (worker,) = ours["spec"]["containers"]
    given = spec.get("containers") or [{"name": worker["name"]}]
    lists = ("env", "volumeMounts")
    containers = [
        _joined(one, worker, lists) if one["name"] == worker["name"] else one for one in given
    ]
    joined = _joined(spec, ours["spec"], ("volumes",))
    return {**template, "spec": {**joined, "containers": containers}}


def _joined(
    given: Mapping[str, Any], ours: Mapping[str, Any], lists: tuple[str, ...]
) -> dict[str, Any]:
    both = {name: [*given.get(name, ()), *ours.get(name, ())] for name in lists}
    return {**given, **ours, **{name: values for name, values in both.items() if values}}
