"""What schedulers are asked for; nothing is submitted."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from monarch.config import configured

from forge_trainer.actors.guard import HostFacts
from forge_trainer.config import LaunchConfig
from forge_trainer.errors import ConfigError
from forge_trainer.processes.hosts import jobs
from forge_trainer.processes.hosts.guards import HostGuards, require_address
from forge_trainer.processes.hosts.launch import Hosts


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Monarch's jobs choose a transport for the whole process."""
    with configured():
        yield


def _launch(**values: Any) -> LaunchConfig:
    hosts = {"trainer": 2, "generator": 1}
    return LaunchConfig.model_validate({"hosts": hosts, "gpus_per_host": 8, **values})


def test_slurm_is_asked_for_all_hosts_in_one_job() -> None:
    launch = _launch(
        kind="slurm",
        bind="10.0.0.1",
        python="/envs/forge/bin/python",
        slurm={"partition": "train", "account": "rl", "arguments": ["--constraint=h100"]},
    )
    job = jobs.slurm_job(launch, None)
    asked = {
        "_meshes": {"trainer": 2, "generator": 1},
        "_python_exe": "/envs/forge/bin/python",
        "_slurm_args": ["--constraint=h100"],
        "_partition": "train",
        "_account": "rl",
        "_gpus_per_node": 8,
        "_bind_to": "10.0.0.1",
        "_job_start_timeout": 600,
        "_exclusive": True,
    }
    assert {name: getattr(job, name) for name in asked} == asked


GOLDEN = {
    "apiVersion": "monarch.pytorch.org/v1alpha1",
    "kind": "MonarchMesh",
    "replicas": 2,
    "port": 26600,
    "image": "registry.example/forge:1",
    "limits": {"nvidia.com/gpu": "8"},
}


def test_kubernetes_is_asked_for_a_mesh_of_pods_per_role(monkeypatch: pytest.MonkeyPatch) -> None:
    client = pytest.importorskip("kubernetes", reason="uv sync --extra kubernetes").client
    from monarch._src.job.kubernetes import KubeConfig

    created: list[dict[str, Any]] = []

    def missing(self: Any, **asked: Any) -> None:
        raise client.exceptions.ApiException(status=404)

    def create(self: Any, **asked: Any) -> None:
        created.append(asked)

    api = client.CustomObjectsApi
    monkeypatch.setattr(api, "get_namespaced_custom_object", missing)
    monkeypatch.setattr(api, "create_namespaced_custom_object", create)
    pods = {
        "namespace": "rl",
        "image": GOLDEN["image"],
        "resources": GOLDEN["limits"],
        "labels": {"team": "rl"},
    }
    launch = _launch(kind="kubernetes", kubernetes=pods)
    nowhere = KubeConfig.from_config(client.Configuration(host="http://127.0.0.1:1"))
    jobs.kubernetes_job(launch, "a1b2", kubeconfig=nowhere).apply()
    assert [asked["body"]["metadata"]["name"] for asked in created] == [
        "trainera1b2",
        "generatora1b2",
    ]
    trainer = created[0]["body"]
    (container,) = trainer["spec"]["podTemplate"]["spec"]["containers"]
    assert created[0]["namespace"] == "rl"
    assert created[0]["plural"] == "monarchmeshes"
    assert trainer["metadata"]["labels"]["team"] == "rl"
    assert {
        "apiVersion": trainer["apiVersion"],
        "kind": trainer["kind"],
        "replicas": trainer["spec"]["replicas"],
        "port": trainer["spec"]["port"],
        "image": container["image"],
        "limits": container["resources"]["limits"],
    } == GOLDEN
    assert container["resources"]["requests"] == GOLDEN["limits"]
    assert "run_worker_loop_forever" in " ".join(container["command"])


class _Guards:
    """Of two hosts, of which the second sees nothing."""

    def __init__(self) -> None:
        self.sees = self

    async def call(self, path: str, writable: bool) -> dict[int, bool]:
        return {0: True, 1: False}


def test_a_folder_that_one_host_does_not_see_is_refused_with_its_name(tmp_path: Path) -> None:
    facts = [HostFacts("node1", "10.0.0.1"), HostFacts("node2", "10.0.0.2")]
    launch = _launch(kind="slurm")
    guards = HostGuards({"trainer": _Guards()}, {"trainer": facts})
    hosts = Hosts(launch, {}, guards)
    folder = tmp_path / "checkpoints"
    with pytest.raises(ConfigError) as caught:
        asyncio.run(hosts.require_shared("trainer.checkpoint_folder", folder))
    assert "trainer.checkpoint_folder" in str(caught.value)
    assert "trainer/1 (node2)" in str(caught.value)
    assert "trainer/0" not in str(caught.value)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("launch", "facts", "message"),
    [
        ({"kind": "slurm"}, HostFacts("node1", "127.0.1.1"), "calls itself node1, which is"),
        ({"kind": "slurm"}, HostFacts("node1", None), "has no IPv4 address on its name"),
        ({"kind": "slurm", "interface": "ib0"}, HostFacts("node1", None), "address on ib0"),
        ({"kind": "slurm", "interface": "lo"}, HostFacts("node1", "127.0.0.1"), None),
        ({"kind": "slurm"}, HostFacts("node1", "10.0.0.1"), None),
    ],
)
def test_a_host_that_others_cannot_reach_is_told_at_the_start(
    launch: dict[str, Any], facts: HostFacts, message: str | None
) -> None:
    if message is None:
        require_address(_launch(**launch), "trainer/0", facts)
        return
    with pytest.raises(ConfigError, match=message):
        require_address(_launch(**launch), "trainer/0", facts)


def test_a_controller_that_nobody_reaches_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    with pytest.raises(ConfigError, match="launch.controller_address: this machine calls itself"):
        jobs.listen_at(LaunchConfig())
    chosen: list[str] = []
    monkeypatch.setattr(
        jobs, "configure", lambda **given: chosen.append(given["default_transport"])
    )
    given = _launch(kind="slurm", controller_address="loopback.example")
    jobs.listen_at(given)
    jobs.listen_at(given, scheme="tls")
    # A certificate is for a name.
    assert chosen == ["tcp://127.0.1.1:0", "tls://loopback.example:0"]
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "0.0.0.0")
    with pytest.raises(ConfigError, match="is no address of this machine"):
        jobs.listen_at(given)
