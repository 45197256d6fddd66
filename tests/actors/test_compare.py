"""Published weights against a running generator and a checkpoint of two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forge_trainer.errors import WeightsError
from forge_trainer.pieces import WeightsRef
from forge_trainer.run.compare import Comparison, WeightSource, compare_weights
from forge_trainer.run.weight_sources import (
    GeneratorWeights,
    HeldWeights,
    PublishedWeights,
    read_checkpoint,
)
from tests.actors.conftest import TRAINER, Cluster
from tests.data import random_sequences

NAME = "model.layers.1.self_attn.q_proj.weight"


async def _compare(cluster: Cluster, ref: WeightsRef, checkpoint: str) -> list[Comparison]:
    tensors = await read_checkpoint(
        Path(checkpoint), model_dir=cluster.model_dir, trainer=TRAINER, dtype=torch.float32
    )
    others: list[WeightSource] = [
        GeneratorWeights(cluster.generator),
        HeldWeights("checkpoint", tensors),
    ]
    async with cluster.store.reading(ref.version) as reading:
        return await compare_weights(PublishedWeights(reading), others, first=100)


def test_a_generator_and_a_checkpoint_of_another_step_are_told_by_name(
    cluster: Cluster, tmp_path: Path
) -> None:
    trainer, generator = cluster.trainer, cluster.generator
    cluster.run(generator.pull_weights(cluster.run(trainer.push_weights())))
    cluster.run(trainer.train_step(random_sequences(), loss="grpo"))
    saved = cluster.run(trainer.save(path=str(tmp_path / "step")))
    ref = cluster.run(trainer.push_weights())

    late, same = cluster.run(_compare(cluster, ref, saved.path))
    assert (late.num_tensors, same.num_tensors) == (ref.num_tensors, ref.num_tensors)
    assert same.differences == ()
    (found,) = [one for one in late.differences if one.name == NAME]
    assert found.values is not None
    assert 0 < found.values.num_different <= found.values.num_elements == 128 * 64
    # One update of AdamW at lr=1e-2.
    assert 1e-5 < found.values.largest < 2e-2

    cluster.run(generator.pull_weights(ref))
    cluster.run(trainer.train_step(random_sequences(), loss="grpo"))
    newer = cluster.run(trainer.push_weights())
    cluster.run(generator.pull_weights(newer))
    equal, old = cluster.run(_compare(cluster, newer, saved.path))
    assert equal.differences == ()
    assert NAME in {one.name for one in old.differences}


def test_a_tensor_without_a_name_is_an_error_of_the_handle(cluster: Cluster) -> None:
    with pytest.raises(WeightsError, match=r"no tensor 'model\.nothing'"):
        cluster.run(cluster.generator.read_weight("model.nothing"))
    tied = cluster.run(cluster.generator.read_weight("lm_head.weight"))
    embedding = cluster.run(cluster.generator.read_weight("model.embed_tokens.weight"))
    assert torch.equal(tied, embedding)
