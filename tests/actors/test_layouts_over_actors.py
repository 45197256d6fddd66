"""Tensor and pipeline parallel through the handle: whose answers count, what is pushed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from forge_trainer.config import ParallelConfig
from forge_trainer.engine.local import LocalEngine
from forge_trainer.errors import EngineError
from forge_trainer.functional.losses.objective import make_loss
from forge_trainer.functional.packing import PackingPlan, pack_sequences
from forge_trainer.types import LossOutput, SamplingParams, TrainBatch, TrainSequence
from tests.actors.conftest import TRAINER, Cluster, running_cluster
from tests.data import random_sequences

LAYOUTS = {"tp2": ParallelConfig(tensor=2), "pp2": ParallelConfig(pipeline=2)}


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(
    request: pytest.FixtureRequest, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    config = TRAINER.model_copy(update={"parallel": LAYOUTS[request.param]})
    with running_cluster(tiny_llama, tmp_path_factory.mktemp(request.param), config) as cluster:
        yield cluster


def test_the_handle_hides_the_layout(layout: Cluster) -> None:
    """Loss, norm, log-probs and pushed weights are those of one process in float64."""
    trainer = layout.trainer
    engine = LocalEngine(
        TRAINER.model_copy(update={"engine": "local", "num_ranks": 1}),
        layout.model_dir,
        dtype=torch.float64,
    )
    engine.setup()
    for seed in range(2):
        sequences = random_sequences(seed=seed)
        packed = pack_sequences(sequences, dp_size=1, plan=PackingPlan(48, 4, pack=False))
        wanted = engine.forward_backward(packed.batches[0], make_loss("grpo"))
        norm = engine.optim_step().grad_norm
        found = layout.run(trainer.train_step(sequences, loss="grpo", return_logprobs=True))
        metrics = found.forward_backward.metrics
        assert metrics["loss/sum"].value == pytest.approx(wanted.loss_sum, rel=1e-5)
        assert found.optim.grad_norm == pytest.approx(norm, rel=1e-5)
        assert [len(own) for own in found.forward_backward.logprobs] == [len(s) for s in sequences]
    facts = layout.run(trainer.get_config())
    assert facts.dp_size == 1
    assert {tuple(rank.coordinates.items()) for rank in facts.ranks} in (
        {(("dp", 0), ("tp", 0), ("pp", 0)), (("dp", 0), ("tp", 1), ("pp", 0))},
        {(("dp", 0), ("tp", 0), ("pp", 0)), (("dp", 0), ("tp", 0), ("pp", 1))},
    )


def test_the_generator_gets_whole_weights(layout: Cluster) -> None:
    layout.run(layout.trainer.train_step(random_sequences(), loss="grpo"))
    ref = layout.run(layout.trainer.push_weights())
    layout.run(layout.generator.pull_weights(ref))
    sampling = SamplingParams(max_completion_tokens=5, num_completions=3)
    (group,) = layout.run(layout.generator.generate(["3,7:"], sampling))
    sequences = [
        TrainSequence(
            [*c.prompt_token_ids, *c.token_ids],
            [0] * len(c.prompt_token_ids) + [1] * len(c.token_ids),
        )
        for c in group
    ]
    result = layout.run(layout.trainer.forward(sequences, with_entropy=True))
    for completion, values in zip(group, result.logprobs, strict=True):
        found = values[len(completion.prompt_token_ids) :]
        assert found == pytest.approx(list(completion.logprobs), abs=1e-5)
    assert result.entropies is not None
    assert all(0 < h < 5.6 for own in result.entropies for h in own[1:])


def broken_loss(logprobs_BT: torch.Tensor, batch: TrainBatch) -> LossOutput:
    raise KeyError("nobody filled this column")


def test_a_failing_loss_leaves_the_ranks_together(layout: Cluster) -> None:
    with pytest.raises(EngineError, match="nobody filled this column"):
        layout.run(layout.trainer.forward_backward(random_sequences(), loss=broken_loss))
    assert not layout.run(layout.trainer.train_step(random_sequences(), loss="dapo")).optim.skipped
