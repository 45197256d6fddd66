"""What schedulers are asked for; nothing is submitted."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from monarch.config import configured
from pydantic import ValidationError

from forge_trainer.actors.guard import HostFacts
from forge_trainer.config import KubernetesConfig, LaunchConfig
from forge_trainer.errors import ConfigError
from forge_trainer.processes.hosts import jobs
from forge_trainer.processes.hosts.guards import HostGuards, require_address
from forge_trainer.processes.hosts.launch import Hosts
from forge_trainer.processes.hosts.pods import kubernetes_job
from tests.waiting import Gate


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


def test_part_of_a_node_needs_no_other_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """SlurmJob asked clusterscope, which asked `sinfo`, for what its script does not hold."""
    submitted: list[str] = []

    def run(command: list[str], *, input: str, **options: Any) -> subprocess.CompletedProcess[str]:
        submitted.append(input)
        return subprocess.CompletedProcess(command, 0, stdout="Submitted batch job 7\n")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setitem(sys.modules, "clusterscope", None)
    part = {"partition": "train", "exclusive": False, "cpus_per_task": 12, "mem": "200G"}
    jobs.slurm_job(_launch(kind="slurm", slurm=part), None).apply()
    lines = submitted[0].splitlines()
    for asked in ("gpus-per-node=8", "partition=train", "cpus-per-task=12", "mem=200G"):
        assert lines.count(f"#SBATCH --{asked}") == 1
    assert "#SBATCH --exclusive" not in lines


GOLDEN = {
    "apiVersion": "monarch.pytorch.org/v1alpha1",
    "kind": "MonarchMesh",
    "replicas": 2,
    "port": 26600,
    "image": "registry.example/forge:1",
    "limits": {"nvidia.com/gpu": "8"},
}


class _Cluster:
    """Has no mesh, and notes what it is asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.client = pytest.importorskip("kubernetes", reason="uv sync --extra kubernetes").client
        self.created: list[dict[str, Any]] = []
        self.deleted: list[str] = []
        self.has_room_for = 2

        def missing(api: Any, **asked: Any) -> None:
            raise self.client.exceptions.ApiException(status=404)

        def create(api: Any, **asked: Any) -> None:
            if len(self.created) == self.has_room_for:
                raise self.client.exceptions.ApiException(status=403)
            self.created.append(asked)

        def delete(api: Any, **asked: Any) -> None:
            self.deleted.append(asked["name"])

        api = self.client.CustomObjectsApi
        monkeypatch.setattr(api, "get_namespaced_custom_object", missing)
        monkeypatch.setattr(api, "create_namespaced_custom_object", create)
        monkeypatch.setattr(api, "delete_namespaced_custom_object", delete)

    def job(self, pods: dict[str, Any]) -> Any:
        from monarch._src.job.kubernetes import KubeConfig

        nowhere = KubeConfig.from_config(self.client.Configuration(host="http://127.0.0.1:1"))
        launch = _launch(kind="kubernetes", kubernetes={"namespace": "rl", **pods})
        return kubernetes_job(launch, "a1b2", kubeconfig=nowhere)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> _Cluster:
    return _Cluster(monkeypatch)


def test_kubernetes_is_asked_for_a_mesh_of_pods_per_role(cluster: _Cluster) -> None:
    pods = {
        "image": GOLDEN["image"],
        "resources": GOLDEN["limits"],
        "labels": {"team": "rl"},
    }
    cluster.job(pods).apply()
    created = cluster.created
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
    assert "volumes" not in trainer["spec"]["podTemplate"]["spec"], "none was asked for"


TEMPLATE = """\
metadata: {labels: {queue: research}}
spec:
  serviceAccountName: trainer
  tolerations: [{key: nvidia.com/gpu, operator: Exists}]
  volumes: [{name: shared, persistentVolumeClaim: {claimName: rl-data}}]
  containers:
    - name: worker
      image: registry.example/forge:2
      env: [{name: HF_HOME, value: /data/hf}]
      volumeMounts: [{name: shared, mountPath: /data}]
    - {name: exporter, image: registry.example/exporter:1}
"""


def test_pods_have_what_their_template_says_and_a_larger_shared_memory(
    cluster: _Cluster, tmp_path: Path
) -> None:
    """Volumes beside Monarch's own, its command and identities in the container `worker`."""
    file = tmp_path / "pods.yaml"
    file.write_text(TEMPLATE)
    cluster.job({"image": "registry.example/forge:2"}).apply()
    plain = _pod(cluster.created[0])["spec"]["containers"][0]
    for given in (str(file), yaml.safe_load(TEMPLATE)):
        cluster.created.clear()
        cluster.job({"pod_template": given, "shared_memory_size": "64Gi"}).apply()
        for created in cluster.created:
            pod = _pod(created)
            worker, exporter = pod["spec"]["containers"]
            assert pod["metadata"] == {"labels": {"queue": "research"}}
            assert pod["spec"]["serviceAccountName"] == "trainer"
            assert pod["spec"]["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists"}]
            assert pod["spec"]["volumes"] == [
                {"name": "shared", "persistentVolumeClaim": {"claimName": "rl-data"}},
                {"name": "dev-shm", "emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"}},
            ]
            assert worker["volumeMounts"] == [
                {"name": "shared", "mountPath": "/data"},
                {"name": "dev-shm", "mountPath": "/dev/shm"},
            ]
            assert worker["image"] == "registry.example/forge:2"
            assert worker["command"] == plain["command"]
            assert [one["name"] for one in worker["env"]] == [
                "HF_HOME",
                *(one["name"] for one in plain["env"]),
            ]
            assert exporter == {"name": "exporter", "image": "registry.example/exporter:1"}


def _pod(created: dict[str, Any]) -> dict[str, Any]:
    template: dict[str, Any] = created["body"]["spec"]["podTemplate"]
    return template


def test_meshes_of_which_one_cannot_be_had_are_taken_back(cluster: _Cluster) -> None:
    """Monarch thought that nothing had been created, and deleted nothing."""
    cluster.has_room_for = 1

    async def start() -> None:
        async with contextlib.AsyncExitStack() as stack:
            launch = _launch(kind="slurm")
            await jobs._meshes_of(cluster.job({"image": "i"}), launch, stack)

    with pytest.raises(cluster.client.exceptions.ApiException):
        asyncio.run(start())
    assert "trainera1b2" in cluster.deleted


@pytest.mark.parametrize(
    ("pods", "message"),
    [
        ({}, "image is missing"),
        ({"pod_template": "/none/pods.yaml"}, "cannot read /none/pods.yaml: No such file"),
        ({"pod_template": "~/pods.yaml"}, "give a whole path"),
        ({"pod_template": {"containers": []}}, "'containers' is not metadata or spec"),
        ({"pod_template": {"spec": {"containers": [{"image": "i"}]}}}, "must be named worker"),
        ({"pod_template": {"spec": {"containers": {"name": "worker"}}}}, "a list of mappings"),
        ({"image": "i", "worker": {"image": "j"}}, "image is given, and image of container worker"),
        ({"image": "i", "resources": {"cpu": "1"}, "worker": {"resources": {}}}, "resources is"),
        ({"image": "i", "worker": {"command": ["sh"]}}, "has its own command"),
        (
            {
                "image": "i",
                "shared_memory_size": "1Gi",
                "worker": {"volumeMounts": [{"name": "m", "mountPath": "/dev/shm"}]},
            },
            "shared_memory_size is given, and pod_template mounts /dev/shm",
        ),
    ],
)
def test_pods_that_cannot_be_meant_are_refused(pods: dict[str, Any], message: str) -> None:
    if worker := pods.pop("worker", None):
        pods["pod_template"] = {"spec": {"containers": [{"name": "worker", **worker}]}}
    with pytest.raises(ValidationError, match=message):
        _launch(kind="kubernetes", kubernetes={"namespace": "rl", **pods})


def test_a_template_that_is_no_yaml_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "pods.yaml"
    for text, message in (("spec: [", "is not YAML"), ("- spec", "holds no mapping")):
        file.write_text(text)
        with pytest.raises(ValidationError, match=message):
            KubernetesConfig(namespace="rl", image="i", pod_template=str(file))


class _Queue:
    """A job that waits in a queue for ever."""

    def __init__(self) -> None:
        self.gate = Gate()
        self.calls: list[str] = []

    def apply(self) -> None:
        self.calls.append("submitted")

    def state(self, cached_path: None) -> None:
        self.gate.pass_through()
        self.calls.append("got hosts")

    def kill(self) -> None:
        self.calls.append("taken back")


def test_who_gives_up_waiting_in_a_queue_takes_the_job_back() -> None:
    """The wait blocked the event loop, and Ctrl-C with it."""
    job = _Queue()

    async def wait() -> None:
        async with contextlib.AsyncExitStack() as stack:
            await jobs._meshes_of(cast(Any, job), _launch(kind="slurm"), stack)

    async def scenario() -> None:
        task = asyncio.create_task(wait())
        await job.gate.reached()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    try:
        asyncio.run(scenario())
        assert job.calls == ["submitted", "taken back"]
    finally:
        job.gate.open()


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
