"""Errors, metrics and the public surface."""

from __future__ import annotations

import inspect
import pickle

import pytest
import torch

import forge_trainer
from forge_trainer import errors
from forge_trainer.controller.fleet import GeneratorFleet
from forge_trainer.controller.trainer import TrainerHandle
from forge_trainer.errors import ForgeTrainerError, WorkerLostError
from forge_trainer.metrics import (
    Last,
    Max,
    Mean,
    Quantile,
    Sum,
    as_floats,
    merge_metrics,
    metric_values,
)
from forge_trainer.processes.generator_handle import GeneratorHandle
from forge_trainer.protocols import Generator, Trainer


def test_every_error_survives_pickling() -> None:
    for _, cls in inspect.getmembers(errors, inspect.isclass):
        if issubclass(cls, ForgeTrainerError):
            error = pickle.loads(pickle.dumps(cls("what happened")))
            assert type(error) is cls
            assert "what happened" in str(error)


def test_located_errors_keep_their_place_across_processes() -> None:
    error = pickle.loads(pickle.dumps(WorkerLostError("gone", rank=1, phase="save", step=3)))
    assert (error.rank, error.phase, error.step) == (1, "save", 3)
    assert str(error) == "gone (rank 1, phase save, step 3)"


def test_metrics_merge_by_their_own_rule() -> None:
    merged = merge_metrics(
        [
            {"a": Mean(6.0, 4), "b": Sum(1.0), "c": Max(2.0), "d": Last(1.0)},
            {"a": Mean(2.0, 4), "b": Sum(2.0), "c": Max(1.0), "d": Last(5.0)},
        ]
    )
    assert metric_values(merged) == {"a": 1.0, "b": 3.0, "c": 2.0, "d": 5.0}


def test_merging_two_kinds_under_one_key_is_an_error() -> None:
    with pytest.raises(TypeError, match="'a' is reported as Mean and Sum"):
        merge_metrics([{"a": Mean(1.0, 1)}, {"a": Sum(1.0)}])


def test_as_floats_takes_tensors_off_the_device() -> None:
    metrics = as_floats({"a": Mean(torch.tensor(3.0), torch.tensor(2))})  # type: ignore[arg-type]
    assert metrics == {"a": Mean(3.0, 2.0)}
    quantile = Quantile(torch.tensor([1.0, 2.0]), 0.5)  # type: ignore[arg-type]
    assert as_floats({"b": quantile}) == {"b": Quantile((1.0, 2.0), 0.5)}


def test_a_metric_of_one_number_takes_no_vector() -> None:
    """For a time it did, and failed only where ranks were merged."""
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        as_floats({"a": Mean(torch.tensor([1.0, 2.0]), 1)})  # type: ignore[arg-type]


def test_public_names_are_exactly_these() -> None:
    assert sorted(forge_trainer.__all__) == sorted(
        [
            "CheckpointError",
            "ConfigError",
            "DataError",
            "EngineError",
            "ForgeTrainerError",
            "ForwardBackwardResult",
            "LossOutput",
            "NonFiniteError",
            "OptimParams",
            "OptimStepResult",
            "RolloutError",
            "SamplingParams",
            "TrainBatch",
            "TrainSequence",
            "WeightsError",
            "WeightsRef",
            "WorkerLostError",
            "running_services",
            "start_in_process_trainer",
        ]
    )
    for name in forge_trainer.__all__:
        assert getattr(forge_trainer, name) is not None


@pytest.mark.parametrize(
    ("protocol", "kind"),
    [(Trainer, TrainerHandle), (Generator, GeneratorHandle), (Generator, GeneratorFleet)],
)
def test_handles_keep_their_protocols_signatures(protocol: type, kind: type) -> None:
    methods = [name for name in vars(protocol) if not name.startswith("_")]
    assert methods
    for name in methods:
        assert inspect.signature(getattr(kind, name)) == inspect.signature(getattr(protocol, name))


def test_the_trainers_parameters_are_pinned() -> None:
    found = {
        name: " ".join(inspect.signature(method).parameters)
        for name, method in vars(TrainerHandle).items()
        if not name.startswith("_")
    }
    options = "self sequences loss loss_config"
    assert found == {
        "setup": "self",
        "forward": "self sequences with_entropy",
        "forward_backward": f"{options} return_logprobs",
        "optim_step": "self normalize params",
        "train_step": f"{options} normalize params return_logprobs",
        "clear_gradients": "self",
        "save": "self name path weights_only format wait",
        "wait_for_save": "self",
        "to": "self device",
        "train_mode": "self",
        "eval_mode": "self",
        "load": "self path name step weights_only",
        "push_weights": "self policy_version wait",
        "wait_for_push": "self",
        "replace_store": "self restart",
        "get_config": "self",
        "get_status": "self",
        "close": "self",
    }
