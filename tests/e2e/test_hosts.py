"""GRPO over three hosts, which share no memory, as a user starts it."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import psutil

from tests.e2e.apps import RunningApp, read_rows
from tests.processes import wait_until_gone
from tests.waiting import wait_until

CONFIG = "configs/grpo_three_hosts.yaml"
STEPS_SEEN = 4


def test_grpo_over_three_hosts_learns_until_one_is_killed(tmp_path: Path) -> None:
    """Trainer on two hosts, generator on the third. The lost host is named, the rest ends."""
    folder = tmp_path / "run"
    arguments = ["--config", CONFIG, "--run.folder", str(folder), "--run.steps", "2000"]
    arguments += ["--algorithm.loss", "tests.e2e.losses:talking_grpo"]
    app = RunningApp("apps.grpo.main", [*arguments, "--trainer.checkpoint_interval", "2"]).start()
    metrics = folder / "metrics.jsonl"
    app.wait_for(metrics)
    app.wait_until("steps", lambda: len(metrics.read_text().splitlines()) >= STEPS_SEEN)
    facts = json.loads((folder / "trainer.json").read_text())
    assert facts["weights_transport"] == "torchstore"
    assert [rank["visible_devices"] for rank in facts["ranks"]] == ["", ""]
    ranks = [psutil.Process(rank["pid"]) for rank in facts["ranks"]]
    hosts = [rank.parent() for rank in ranks]
    assert hosts[0] != hosts[1]
    logged = [(folder / "logs" / f"{name}.log").read_text() for name in NAMES]
    assert [next(part for part in HOSTS if part in text) for text in logged] == [
        "on host trainer/0",
        "on host trainer/1",
        "on host generator/0",
    ]
    assert all("said by a rank" in text for text in logged[:2]), "hosts throw it away"
    lost = hosts[1]
    assert lost is not None
    os.kill(lost.pid, signal.SIGKILL)
    # What was on it ends with it, and the run after it.
    wait_until(lambda: not ranks[1].is_running() or ranks[1].status() == psutil.STATUS_ZOMBIE)
    code, _, errors = app.finish()
    assert code == 1
    assert "WorkerLostError" in errors
    assert "rank 1, host trainer/1" in errors, errors
    assert not wait_until_gone({rank.pid for rank in ranks})
    rows = [row for row in read_rows(metrics) if "trainer/loss" in row]
    assert len(rows) >= STEPS_SEEN
    assert all(abs(row["rollout/logprob_gap"]) < 1e-3 for row in rows), "weights arrive"
    assert any((folder / "checkpoints").glob("step-*"))


def test_a_lost_host_of_generators_costs_what_was_on_it(tmp_path: Path) -> None:
    """The run goes on with the other one, which still hears that the controller lives.

    Nothing shorter than the time after which a host ends by itself would show that.
    """
    folder, orphan_timeout_s = tmp_path / "run", 20.0
    options = {
        "run.folder": str(folder),
        "run.steps": "100000",
        "launch.hosts": '{"trainer": 1, "generator": 2}',
        "launch.lost_host_s": "3",
        "launch.orphan_timeout_s": str(orphan_timeout_s),
        "trainer.num_ranks": "1",
        "generator.replicas": "2",
        "algorithm.groups_per_step": "8",
    }
    arguments = ["--config", CONFIG, *(f"--{key}={value}" for key, value in options.items())]
    app = RunningApp("apps.grpo.main", arguments).start()
    metrics = folder / "metrics.jsonl"
    app.wait_for(metrics)
    logs = [(folder / "logs" / f"generator-{number}.log").read_text() for number in (0, 1)]
    pids = [re.findall(rf"process (\d+) on host generator/{i}", log) for i, log in enumerate(logs)]
    left, lost = (psutil.Process(int(pid)) for (pid,) in pids)
    host = lost.parent()
    assert host is not None
    assert host != left.parent()
    os.kill(host.pid, signal.SIGKILL)
    controller_log = folder / "logs" / "controller.log"
    app.wait_until("a word on it", lambda: "is taken out" in controller_log.read_text())
    killed = time.monotonic()
    app.wait_until("an orphan's end", lambda: time.monotonic() > killed + 2 * orphan_timeout_s)
    seen = len(metrics.read_text().splitlines())
    app.wait_until("more steps", lambda: len(metrics.read_text().splitlines()) > seen + 2)
    assert left.is_running()
    app.interrupt()
    code, _, errors = app.finish()
    assert code == 130, errors
    assert re.search(r"generator/1 is taken out, .* host generator/1 \(", errors), errors


NAMES = ("trainer-0", "trainer-1", "generator-0")
HOSTS = ("on host trainer/0", "on host trainer/1", "on host generator/0")
