"""Hosts of every kind that can be had on one machine: started, spoken to, lost, left alone."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.actors.stand_ins import FULL_SLURM, SLURM, SSH, SSH_WITHOUT_A_KEY, stand_ins
from tests.processes import descendants, wait_until_gone
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
ASKED_AGAIN = 50
"""Until which a worker that ends with its connection has ended."""
PROCESSES = {"kind": "processes", "hosts": {"trainer": 2, "generator": 1}}


class Controller:
    """A process that holds hosts until it is told to let go."""

    def __init__(
        self,
        launch: dict[str, Any],
        folder: Path,
        *,
        num_ranks: int = 2,
        gpus: int = 0,
        environment: dict[str, str] | None = None,
    ) -> None:
        self._errors = folder / "errors"
        arguments = [json.dumps(launch), str(num_ranks), str(gpus)]
        with self._errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.actors.hosts_script", *arguments],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def told(self) -> dict[str, Any]:
        """What its witnesses said; waits for them."""
        told: dict[str, Any] = self._line()
        return told

    def told_again(self) -> list[dict[str, Any]]:
        """What those of the generator say now."""
        assert self.process.stdin is not None
        self.process.stdin.write("again\n")
        self.process.stdin.flush()
        told: list[dict[str, Any]] = self._line()
        return told

    def _line(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.errors()
        return json.loads(line)

    def errors(self) -> str:
        self.process.wait()
        return self._errors.read_text()

    def let_go(self) -> None:
        """Let it close everything and end."""
        out, _ = self.process.communicate("")
        assert json.loads(out) == "closed", self.errors()


@contextlib.contextmanager
def controlling(*args: Any, **kwargs: Any) -> Iterator[Controller]:
    """A controller; whatever becomes of it, nothing of it is left behind."""
    before = descendants()
    controller = Controller(*args, **kwargs)
    try:
        yield controller
    finally:
        controller.process.kill()
        controller.process.communicate()
        for pid in descendants() - before:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _pids(told: dict[str, Any]) -> set[int]:
    witnesses = [one for role in ("trainer", "generator") for one in told[role]]
    return {one[key] for one in witnesses for key in ("pid", "host_pid")}


def test_processes_find_their_devices_and_hosts(tmp_path: Path) -> None:
    """Ranks host by host, each mesh with devices of its own, out of what is left on its hosts."""
    launch = {**PROCESSES, "kind": "slurm", "gpus_per_host": 2}
    with (
        stand_ins(tmp_path, SLURM) as environment,
        controlling(
            {
                **launch,
                "controller_address": "127.0.0.1",
                "interface": "lo",
                "port": _free_port(),
                "slurm": {"partition": "p", "time_limit": "01:00:00"},
            },
            tmp_path,
            num_ranks=4,
            gpus=2,
            environment=environment,
        ) as controller,
    ):
        told = controller.told()
        controller.let_go()
        assert wait_until_gone(_pids(told)) == set()
    seen = [(one["rank"], one["FORGE_TRAINER_HOST"]) for one in told["trainer"]]
    assert seen == [(0, "trainer/0"), (1, "trainer/0"), (2, "trainer/1"), (3, "trainer/1")]
    devices = [one["CUDA_VISIBLE_DEVICES"] for one in told["trainer"]]
    assert devices == ["0,1", "0,1", "6,7", "6,7"]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in told["generator"]] == ["GPU-8a3b"]
    cores = len(os.sched_getaffinity(0))
    assert told["cpu_threads"] == {"trainer": max(1, cores // 2), "generator": cores}
    # One node each, and what the scheduler says is there.
    nodes = [one["SLURM_NODEID"] for one in [*told["trainer"][::2], *told["generator"]]]
    assert sorted(nodes) == ["0", "1", "2"]


def test_hosts_end_by_themselves_when_their_controller_is_killed(tmp_path: Path) -> None:
    with controlling(
        {**PROCESSES, "lost_host_s": 1, "orphan_timeout_s": 13}, tmp_path
    ) as controller:
        told = controller.told()
        everybody = _pids(told) | descendants(controller.process.pid)
        assert len(everybody) > len(_pids(told)), "the guards"
        controller.process.send_signal(signal.SIGKILL)
        assert wait_until_gone(everybody) == set()


def test_workers_that_wait_serve_holders_of_a_certificate_alone(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("makes certificates with openssl")
    certificates = make_certificates(tmp_path)
    ports = [_free_port() for _ in range(2)]
    addresses = [f"tls://localhost:{port}" for port in ports]
    launch = {
        "kind": "hosts",
        "addresses": {"trainer": addresses[:1], "generator": addresses[1:]},
        "tls": certificates["ours"],
        "controller_address": "localhost",
        "interface": "lo",
    }
    with waiting_workers(addresses, certificates["ours"], tmp_path) as workers:
        for _ in range(2):
            # One run after another; workers stay, what ran on them does not.
            with controlling(launch, tmp_path) as controller:
                told = controller.told()
                assert {told[role][0]["host_pid"] for role in ("trainer", "generator")} == workers
                controller.let_go()
                assert wait_until_gone(_pids(told) - workers) == set()
        stranger = {**launch, "tls": certificates["stranger"], "start_timeout_s": 5}
        with controlling(stranger, tmp_path) as controller:
            assert "ConfigError: launch" in controller.errors()
        assert all(Path(f"/proc/{pid}").exists() for pid in workers)


def test_who_gives_up_in_a_queue_takes_the_job_back(tmp_path: Path) -> None:
    """Waiting blocked the event loop: the first Ctrl-C did nothing, and the job stayed."""
    launch = {**PROCESSES, "kind": "slurm", "controller_address": "127.0.0.1"}
    with (
        stand_ins(tmp_path, FULL_SLURM) as environment,
        controlling(launch, tmp_path, environment=environment) as controller,
    ):
        wait_until((tmp_path / "asked").exists, "a look at the queue")
        controller.process.send_signal(signal.SIGINT)
        assert "KeyboardInterrupt" in controller.errors()
    assert (tmp_path / "cancelled").read_text() == "7\n"


def _over_ssh() -> dict[str, Any]:
    """The stand-in runs here what it is asked to run there; machines are loopback addresses."""
    return {
        "kind": "ssh",
        "addresses": {"trainer": ["127.0.0.2", "127.0.0.3"], "generator": ["127.0.0.4"]},
        "controller_address": "127.0.0.1",
        "interface": "lo",
        "port": _free_port(),
    }


def test_workers_that_ssh_starts_end_with_the_run(tmp_path: Path) -> None:
    """Also where one is lost, which kept Monarch from ending the others of its mesh. And not with a
    connection that breaks."""
    with (
        stand_ins(tmp_path, SSH) as environment,
        controlling(_over_ssh(), tmp_path, environment=environment) as controller,
    ):
        told = controller.told()
        hosts = {one["host_pid"] for role in ("trainer", "generator") for one in told[role]}
        assert hosts == {int(file.read_text()) for file in tmp_path.glob("*.pid")}
        assert len(hosts) == 3
        _connection(tmp_path, "127.0.0.4").kill()
        for _ in range(ASKED_AGAIN):
            assert controller.told_again() == told["generator"]
        os.kill(told["trainer"][1]["host_pid"], signal.SIGKILL)
        controller.let_go()
        assert wait_until_gone(_pids(told)) == set()


def _connection(folder: Path, host: str) -> psutil.Process:
    return psutil.Process(int((folder / f"{host}.ssh").read_text()))


def test_a_failed_login_is_told_and_ends_what_other_machines_run(tmp_path: Path) -> None:
    """It was a time-out after minutes, and the workers elsewhere stayed."""
    with (
        stand_ins(tmp_path, SSH_WITHOUT_A_KEY) as environment,
        controlling(_over_ssh(), tmp_path, environment=environment) as controller,
    ):
        errors = controller.errors()
        assert "ConfigError: launch.addresses: `ssh 127.0.0.3` ended with code 255" in errors
        assert "me@127.0.0.3: Permission denied (publickey)." in errors
        assert wait_until_gone({int((tmp_path / "127.0.0.2.pid").read_text())}) == set()


@contextlib.contextmanager
def waiting_workers(
    addresses: Sequence[str], certificate: dict[str, str], folder: Path
) -> Iterator[set[int]]:
    """Processes of apps.host.main, one per address; their ids."""
    given = [word for name, file in certificate.items() for word in (f"--{name}", file)]
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "apps.host.main", "--address", address, *given],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for address in addresses
    ]
    try:
        for address in addresses:
            port = int(address.rpartition(":")[2])
            wait_until(functools.partial(_listens, port), f"a worker at {address}")
        yield {worker.pid for worker in workers}
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def make_certificates(folder: Path) -> dict[str, dict[str, str]]:
    """`ours`, signed by our CA, and a stranger's, signed by nobody else; paths of PEM files."""

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    new = ("req", "-newkey", "rsa:2048", "-nodes")
    for name in ("ca", "stranger"):
        files = ("-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}")
        openssl(*new, "-x509", "-days", "2", *files)
    openssl(*new, "-keyout", "host.key", "-out", "host.csr", "-subj", "/CN=host")
    (folder / "extensions").write_text(
        f"subjectAltName=DNS:{socket.gethostname()},DNS:localhost\n"
        "extendedKeyUsage=serverAuth,clientAuth\n"
    )
    signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2")
    extensions = ("-extfile", "extensions")
    openssl("x509", "-req", "-in", "host.csr", *signed, *extensions, "-out", "host.pem")
    return {
        whose: {
            "ca": str(folder / "ca.pem"),
            "certificate": str(folder / f"{name}.pem"),
            "key": str(folder / f"{name}.key"),
        }
        for whose, name in (("ours", "host"), ("stranger", "stranger"))
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("localhost", port)) == 0
