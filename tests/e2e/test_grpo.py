"""The GRPO app as a user runs it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from apps.grpo.main import main
from forge_trainer.config import GrpoConfig, TaskConfig, TrainerConfig
from forge_trainer.config.load import load_config
from forge_trainer.data.prompts import make_task
from forge_trainer.run.weight_sources import read_checkpoint
from tests.e2e.apps import TINY, RunningApp, read_rows, run_app
from tests.processes import descendants

APP = "apps.grpo.main"
KEYS = {
    "advantage/mean",
    "advantage/std",
    "memory/peak_gb",
    "step",
    "policy_version",
    "reward/mean",
    "reward/groups_with_signal",
    "rollout/completion_tokens",
    "rollout/logprob_gap",
    "rollout/stopped",
    "time/forward_backward_s",
    "time/optim_step_s",
    "time/step_s",
    "time/train_s",
    "time/wait_rollout_s",
    "trainer/grad_norm",
    "trainer/learning_rate",
    "trainer/loss",
    "trainer/skipped_steps",
    "trainer/target_tokens",
    "trainer/tokens_per_s",
    "trainer/tokens_per_s_per_rank",
    "weights/bytes",
    "weights/pull_gb_per_s",
    "weights/pull_s",
    "weights/push_gb_per_s",
    "weights/push_s",
    "weights/readers",
    "weights/stall_s",
    "weights/versions_held",
}


def test_a_short_run_leaves_all_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    short = ["--run.steps", "4"]
    options = [*TINY, *short, "--run.folder", str(folder), "--trainer.checkpoint_interval", "2"]
    code, out, err = run_app(APP, *options)
    assert (code, err) == (0, ""), err
    assert re.search(r"step 4/4 .*reward .*loss .*tok/s .*sync .*left", out)
    assert f"run folder: {folder}\ntrained model: {folder / 'final'}" in out

    rows = read_rows(folder / "metrics.jsonl")
    wanted = [(1, 0), (2, 1), (3, 2), (4, 3)]
    assert [(row["step"], row["policy_version"]) for row in rows] == wanted
    for row in rows:
        assert row.keys() >= KEYS
        assert row["rollout/logprob_gap"] < 1e-4
    rollouts = read_rows(folder / "rollouts.jsonl")
    assert {(r["step"], r["policy_version"]) for r in rollouts} == set(wanted)
    assert rollouts[0].keys() >= {"prompt", "completion", "reward"}
    assert len(list((folder / "tensorboard").glob("events.*"))) == 1
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"step-2", "step-4"}
    facts = json.loads((folder / "trainer.json").read_text())
    assert [rank["coordinates"]["dp"] for rank in facts["ranks"]] == [0, 1]
    assert load_config(GrpoConfig, folder / "run_config.yaml").run.steps == 4
    logs = {path.stem: path.read_text() for path in (folder / "logs").iterdir()}
    assert logs.keys() == {"controller", "trainer-0", "trainer-1", "generator-0"}
    assert "trainer: 2 processes on 1 host, CPU, 1 threads each" in logs["controller"]
    assert "INFO forge_trainer.worker: rank 1 of 2 is set up" in logs["trainer-1"]
    _require_trained_model(folder)

    code, _, err = run_app(APP, *options)
    assert code == 2
    assert "holds an earlier run; give --overwrite" in err
    assert read_rows(folder / "metrics.jsonl") == rows


def test_a_run_whose_weights_travel_over_torchstore(tmp_path: Path) -> None:
    """All that differs from shared memory is how the weights came: the gap shows that they did."""
    folder = tmp_path / "run"
    options = ["--run.steps", "4", "--run.folder", str(folder)]
    over = ["--config", "configs/grpo_tiny.yaml", "--weights.transport", "torchstore"]
    code, _, err = run_app(APP, *over, *options)
    assert (code, err) == (0, ""), err
    rows = read_rows(folder / "metrics.jsonl")
    assert [(row["step"], row["policy_version"]) for row in rows] == [
        (1, 0),
        (2, 1),
        (3, 2),
        (4, 3),
    ]
    for row in rows:
        assert row["rollout/logprob_gap"] < 1e-4
        assert row["weights/bytes"] > 0
        assert row["weights/versions_held"] <= 3
    _require_trained_model(folder)


def _require_trained_model(folder: Path) -> None:
    """transformers loads it as it is, it has changed, and it is what the last checkpoint holds."""
    made = AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()
    trained = AutoModelForCausalLM.from_pretrained(folder / "final").state_dict()
    assert made.keys() == trained.keys()
    assert any(not torch.equal(made[name], trained[name]) for name in made)
    prompt = AutoTokenizer.from_pretrained(folder / "final").encode("3,7:")
    assert prompt == AutoTokenizer.from_pretrained(folder / "model").encode("3,7:")
    config = TrainerConfig(trainable=False, device="cpu")
    tensors = asyncio.run(
        read_checkpoint(
            folder / "checkpoints" / "step-4",
            model_dir=folder / "model",
            trainer=config,
            dtype=torch.float32,
        )
    )
    assert all(torch.equal(trained[name], tensor) for name, (tensor, _) in tensors.items())


def test_a_reference_model_and_several_updates_per_batch(tmp_path: Path) -> None:
    """Two epochs of two minibatches, a KL term, checkpoints beside training."""
    folder = tmp_path / "run"
    options = {
        "run.folder": str(folder),
        "run.steps": "8",
        "algorithm.groups_per_step": "4",
        "algorithm.epochs": "2",
        "algorithm.minibatches": "2",
        "algorithm.loss_options": '{"kl_coef": 0.05}',
        "reference": '{"num_ranks": 1}',
        "trainer.checkpoint_interval": "4",
        "trainer.async_checkpoints": "true",
    }
    code, _, err = run_app(APP, *TINY, *(f"--{key}={value}" for key, value in options.items()))
    assert (code, err) == (0, ""), err
    first, second = read_rows(folder / "metrics.jsonl")
    assert (first["step"], second["step"]) == (4, 8)
    assert first.keys() >= KEYS | {"loss/ref_kl", "time/reference_s"}
    assert first["loss/ref_kl"] > 0
    assert second["loss/ref_kl"] > 0
    checkpoints = folder / "checkpoints"
    assert {path.name for path in checkpoints.iterdir()} == {"step-4", "step-8"}
    assert all((path / "forge_trainer.json").is_file() for path in checkpoints.iterdir())


def test_it_really_learns(tmp_path: Path) -> None:
    """Mean reward at most 0.3 in the first five steps and at least 0.8 over the last ten."""
    options = ["--run.steps", "150", "--run.folder", str(tmp_path / "run")]
    code, _, err = run_app(APP, *TINY, *options)
    assert (code, err) == (0, ""), err
    rewards = [row["reward/mean"] for row in read_rows(tmp_path / "run" / "metrics.jsonl")]
    assert max(rewards[:5]) <= 0.3
    assert sum(rewards[-10:]) / 10 >= 0.8


@pytest.mark.parametrize("moment", ["reading", "starting", "training"])
def test_ctrl_c_stops_cleanly(tmp_path: Path, moment: str) -> None:
    folder = tmp_path / "run"
    app = RunningApp(APP, [*TINY, "--run.folder", str(folder)]).start()
    if moment == "starting":
        app.wait_for_processes(3)
    else:
        app.wait_for(folder / {"reading": "run_config.yaml", "training": "metrics.jsonl"}[moment])
    app.interrupt()
    code, _, err = app.finish()
    assert (code, err) == (130, "stopped\n"), err


def test_sigterm_stops_cleanly(tmp_path: Path) -> None:
    """Also what a shell has started in the background, which ignores Ctrl-C."""
    folder = tmp_path / "run"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        app = RunningApp(APP, [*TINY, "--run.folder", str(folder)]).start()
    finally:
        signal.signal(signal.SIGINT, before)
    app.wait_for(folder / "metrics.jsonl")
    app.terminate()
    code, _, err = app.finish()
    assert (code, err) == (143, "terminated\n"), err


def test_a_killed_rank_ends_the_run_and_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    app = RunningApp(APP, [*TINY, "--run.folder", str(folder)]).start()
    app.wait_for(folder / "metrics.jsonl")
    facts = json.loads((folder / "trainer.json").read_text())
    os.kill(facts["ranks"][1]["pid"], signal.SIGKILL)
    code, _, err = app.finish()
    assert code == 1
    assert re.search(r"WorkerLostError: a trainer process is gone: .*\(rank 1, phase \w+", err), err


def test_a_generator_of_two_that_is_killed_costs_no_group_and_no_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = {
        "run.folder": str(folder),
        "run.steps": "20",
        "generator.replicas": "2",
        "algorithm.groups_per_step": "4",
        "reporting.rollouts_per_step": "32",
    }
    arguments = [*TINY, *(f"--{key}={value}" for key, value in options.items())]
    app = RunningApp(APP, arguments).start()
    app.wait_for(folder / "metrics.jsonl")
    log = (folder / "logs" / "generator-1.log").read_text()
    (pid,) = re.findall(r"process (\d+) on host", log)
    os.kill(int(pid), signal.SIGKILL)
    code, out, err = app.finish()
    assert code == 0, err
    assert "generator/1 is taken out, 1 of 2 generators are left" in err
    assert f"trained model: {folder / 'final'}" in out

    rows = read_rows(folder / "metrics.jsonl")
    assert [(row["step"], row["policy_version"]) for row in rows] == [
        (step, step - 1) for step in range(1, 21)
    ]
    prompts = make_task(TaskConfig(), seed=0).prompts
    wanted = [[next(prompts).text for _ in range(4)] for _ in range(20)]
    rollouts = read_rows(folder / "rollouts.jsonl")
    for step, texts in enumerate(wanted, 1):
        trained = Counter(one["prompt"] for one in rollouts if one["step"] == step)
        assert trained == Counter(text for text in texts for _ in range(8))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--config", "configs/none.yaml"], "cannot read config file 'configs/none.yaml'"),
        ([*TINY, "--trainer.num_rank", "2"], "did you mean trainer.num_ranks"),
        ([*TINY, "--algorithm.group_size", "1"], "algorithm.group_size: got '1'"),
        ([*TINY, "--run.folder", "/proc/none"], "cannot write to /proc/none"),
        ([*TINY, "--task.name", "no_such_task"], "no_such_task"),
    ],
    ids=["file", "key", "range", "folder", "task"],
)
def test_a_bad_config_ends_with_2_before_any_process(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = descendants()
    assert main(options) == 2
    assert descendants() == before
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.startswith("ConfigError: ")
    assert err.count("\n") <= 2


def test_a_bad_config_is_the_exit_code_of_the_process() -> None:
    code, out, err = run_app(APP, *TINY, "--run.steps", "0")
    assert (code, out) == (2, "")
    assert err.startswith("ConfigError: ")
