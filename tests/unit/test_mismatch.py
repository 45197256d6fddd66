"""How far trainer and generator are apart: the numbers, how they merge, and the bound on them."""

from __future__ import annotations

import dataclasses
import logging
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_trainer.config import AlgorithmConfig
from forge_trainer.errors import MismatchError
from forge_trainer.functional.losses.mismatch import mismatch
from forge_trainer.metrics import (
    BINS_PER_DECADE,
    SMALLEST_COUNTED,
    Max,
    Mean,
    Metric,
    Quantile,
    SampleSize,
    as_floats,
    merge_metrics,
    metric_values,
)
from forge_trainer.run.mismatch import count_unscored, judge_mismatch
from forge_trainer.types import (
    ForwardBackwardResult,
    OptimStepResult,
    TrainBatch,
    TrainStepResult,
)
from tests.unit.test_small_functions import episode


def _batch(generator_logprobs: list[float], mask: list[bool] | None = None) -> TrainBatch:
    length = len(generator_logprobs)
    return TrainBatch(
        token_ids_BT=torch.zeros(1, length, dtype=torch.int64),
        positions_BT=torch.arange(length)[None],
        document_ids_BT=torch.zeros(1, length, dtype=torch.int64),
        loss_mask_BT=torch.tensor([mask or [True] * length]),
        temperatures_BT=torch.ones(1, length),
        generator_logprobs_BT=torch.tensor([generator_logprobs]),
    )


def test_the_gap_and_the_weights_by_hand() -> None:
    """Ratios 2, 1 and 1/2: gaps log 2, 0, log 2; mean ratio 3.5/3; ESS 3.5^2 / (3 * 5.25) = 7/9."""
    batch = _batch([5.0, -1.0, -1.0, -1.0], [False, True, True, True])
    logprobs = torch.tensor([[-5.0, math.log(2) - 1, -1.0, -math.log(2) - 1]])
    values = metric_values(as_floats(mismatch(logprobs, batch)))
    assert values["rollout/logprob_gap"] == pytest.approx(2 * math.log(2) / 3)
    assert values["rollout/logprob_gap_max"] == pytest.approx(math.log(2))
    assert math.log(2) <= values["rollout/logprob_gap_p99"] < 1.123 * math.log(2)
    assert values["rollout/ratio"] == pytest.approx(3.5 / 3)
    assert values["rollout/effective_sample_size"] == pytest.approx(7 / 9)


def test_without_the_generators_logprobs_there_is_nothing() -> None:
    batch = dataclasses.replace(_batch([-1.0]), generator_logprobs_BT=None)
    assert mismatch(torch.tensor([[-1.0]]), batch) == {}


def test_equal_policies_are_exactly_zero_apart() -> None:
    values = metric_values(as_floats(mismatch(torch.tensor([[-1.0, -2.0]]), _batch([-1.0, -2.0]))))
    assert values == {
        "rollout/logprob_gap": 0.0,
        "rollout/logprob_gap_max": 0.0,
        "rollout/logprob_gap_p99": 0.0,
        "rollout/ratio": 1.0,
        "rollout/effective_sample_size": 1.0,
    }


def test_a_batch_without_targets_adds_nothing() -> None:
    empty = as_floats(mismatch(torch.tensor([[-1.0]]), _batch([-2.0], [False])))
    full = as_floats(mismatch(torch.tensor([[-1.0]]), _batch([-2.0])))
    assert metric_values(empty) == dict.fromkeys(empty, 0.0)
    assert metric_values(merge_metrics([full, empty])) == metric_values(full)


def test_what_is_no_number_is_the_largest_gap() -> None:
    """The histogram's index of NaN lay outside of it; with on_non_finite: skip, steps have one."""
    metrics = as_floats(mismatch(torch.tensor([[math.nan]]), _batch([-1.0])))
    assert metrics["rollout/logprob_gap_p99"].value >= 20
    assert math.isnan(metrics["rollout/logprob_gap"].value)


GAPS = st.one_of(st.just(0.0), st.floats(-9.0, 1.3).map(lambda power: 10.0**power))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(GAPS, min_size=1, max_size=300), st.integers(1, 5))
def test_the_quantile_is_within_its_bin_however_it_is_split(gaps: list[float], parts: int) -> None:
    """Against numpy's on all values at once: never below, at most a bin's width above."""

    def metrics_of(some: list[float]) -> dict[str, Metric]:
        return as_floats(mismatch(torch.tensor([some]), _batch([0.0] * len(some))))

    split = [part for i in range(parts) if (part := gaps[i::parts])]
    merged = merge_metrics(metrics_of(part) for part in split)
    assert merged["rollout/logprob_gap_p99"] == metrics_of(gaps)["rollout/logprob_gap_p99"]
    exact = float(np.quantile(np.array(gaps, np.float32), 0.99, method="inverted_cdf"))
    found = merged["rollout/logprob_gap_p99"].value
    if exact < SMALLEST_COUNTED * 0.999:
        assert found == 0.0
    else:
        width = 10 ** (1 / BINS_PER_DECADE)
        # Float32 can put a value that lies on an edge on its other side.
        assert exact * 0.9999 <= found <= exact * width * 1.0001


def test_sample_sizes_merge_by_their_sums() -> None:
    """Weights 1, 1 and 4: (1 + 1 + 4)^2 / (3 * 18) = 2/3; alone 1 each."""
    parts = [{"a": SampleSize(2.0, 2.0, 2)}, {"a": SampleSize(4.0, 16.0, 1)}]
    assert [part["a"].value for part in parts] == [1.0, 1.0]
    assert metric_values(merge_metrics(parts)) == {"a": pytest.approx(2 / 3)}
    assert SampleSize(0.0, 0.0, 0).value == 0.0


def _result(gap: float | None, step: int = 7) -> TrainStepResult:
    """Of ten tokens."""
    metrics: dict[str, Metric] = {"loss/mean": Mean(0.0, 10)}
    if gap is not None:
        metrics |= {
            "rollout/logprob_gap": Mean(10 * gap, 10),
            "rollout/logprob_gap_p99": Quantile((10.0,)),
            "rollout/logprob_gap_max": Max(4.5),
            "rollout/effective_sample_size": SampleSize(10.0, 40.0, 10),
        }
    return TrainStepResult(ForwardBackwardResult(metrics, 10, 2), OptimStepResult(step, 1.0, 0.1))


@pytest.mark.parametrize(
    ("gaps", "bound"), [([0.1, 0.2], 0.15), ([0.3], None), ([None], 0.1), ([0.0], 1e-9)]
)
def test_within_the_bound_nothing_is_said(
    gaps: list[float | None], bound: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    """The bound is on the mean over all updates of a batch: of 0.1 and 0.2, 0.15."""
    results = [_result(gap) for gap in gaps]
    judge_mismatch(results, AlgorithmConfig(max_logprob_gap=bound))
    assert caplog.records == []


@pytest.mark.parametrize("gap", [0.31, math.nan])
def test_above_the_bound_a_step_warns_once(gap: float, caplog: pytest.LogCaptureFixture) -> None:
    algorithm = AlgorithmConfig(max_logprob_gap=0.05)
    judge_mismatch([_result(gap), _result(gap)], algorithm)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(f"step 7: trainer and generator are {gap:.3g} nats apart")


def test_or_the_run_stops_and_says_what_to_look_at() -> None:
    algorithm = AlgorithmConfig(max_logprob_gap=0.05, on_logprob_gap="stop")
    with pytest.raises(MismatchError) as caught:
        judge_mismatch([_result(0.31, step=12)], algorithm)
    said = str(caught.value)
    for part in ("0.31", "worst 4.5", "size 25.0%", "max_logprob_gap is 0.05", "step 12", "verify"):
        assert part in said, part


def test_stopping_needs_a_bound() -> None:
    with pytest.raises(ValueError, match="on_logprob_gap is stop, but there is no max_logprob_gap"):
        AlgorithmConfig(on_logprob_gap="stop")


def test_tokens_without_a_logprob_are_counted() -> None:
    whole = episode(1.0)
    logprobs = [0.0, 0.0, -1.0, math.nan, -math.inf]
    transcript = dataclasses.replace(whole.transcripts[0], logprobs=logprobs)
    assert count_unscored([whole, dataclasses.replace(whole, transcripts=(transcript,))]) == 2
