"""Benchmarks say what they measure: ratios of pairs, with their spread."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from apps.bench import main as bench
from apps.bench.measure import Spread, interleaved, ratios
from apps.bench.sharded import ShardedTensors
from apps.bench.suites import logprobs
from apps.bench.suites.rollout import fleet
from forge_trainer.config import GeneratorConfig, TrainerConfig, WeightsConfig
from forge_trainer.types import GenerationRequest, World


def test_pairs_are_taken_in_turn_and_the_first_ones_dropped() -> None:
    calls: list[str] = []

    async def first() -> float:
        calls.append("first")
        return float(len(calls))

    async def second() -> float:
        calls.append("second")
        return float(len(calls))

    pairs = asyncio.run(interleaved(first, second, rounds=2, warmup=1))
    assert calls == ["first", "second"] * 3
    assert pairs == [(3.0, 4.0), (5.0, 6.0)]
    assert ratios([(1.0, 2.0), (3.0, 2.0), (4.0, 4.0)]) == Spread(1.0, 0.5, 1.5, 3)


def test_a_suite_writes_its_ratios(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"TOKENS": 64, "VOCABULARY": 512, "HIDDEN": 16, "ROUNDS": 3}.items():
        monkeypatch.setattr(logprobs, name, value)
    file = tmp_path / "logprobs.json"
    assert bench.main(["--suite", "logprobs", "--json", str(file)]) == 0
    values = json.loads(file.read_text())
    assert values.keys() == {"peak_memory_over_materialised", "time_over_materialised"}
    assert values["time_over_materialised"].keys() == {"median", "min", "max", "n"}
    assert values["time_over_materialised"]["n"] == 3
    assert "forward and" in capsys.readouterr().out


def test_the_engine_of_the_weights_suite_has_what_a_worker_calls_by_itself(tmp_path: Path) -> None:
    """The suite broke when the protocol got these, and no test ran it."""
    engine = ShardedTensors(TrainerConfig(device="cpu"), tmp_path, World())
    engine.progress.begin()
    engine.bound_collectives(60.0)
    engine.abort()
    assert engine.progress.microbatch == 0


def test_what_waits_in_the_fleet_suite_answers_all_that_run_after_as_many_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet, "STEP_S", 0.0)

    async def answer() -> tuple[int, int]:
        generator = fleet.make_waiting(GeneratorConfig(), WeightsConfig(), model_dir=Path())
        await generator.setup()
        requests = [GenerationRequest([0], fleet.SAMPLING) for _ in range(3)]
        await asyncio.gather(*map(generator.generate_one, requests))
        status = await generator.get_status()
        await generator.close()
        return status.num_completions, status.num_steps

    assert asyncio.run(answer()) == (3, fleet.STEPS)
