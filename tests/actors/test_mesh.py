"""A TitanTrainer mesh of two FSDP ranks, a torchstore and a generator, in real processes."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from forge_trainer.engine.local import LocalEngine
from forge_trainer.errors import CheckpointError, DataError, EngineError, WeightsError
from forge_trainer.functional.losses.objective import make_loss
from forge_trainer.functional.packing import PackingPlan, pack_sequences
from forge_trainer.hf import load_causal_lm
from forge_trainer.metrics import Max, Mean
from forge_trainer.pieces import WeightsVersion
from forge_trainer.processes.handles import MeshRanks
from forge_trainer.run.weight_sync import sync_weights
from forge_trainer.types import LossOutput, OptimParams, SamplingParams, TrainBatch, TrainSequence
from tests.actors.conftest import TRAINER, Cluster
from tests.data import random_sequences
from tests.waiting import A_HANG_S, FileGate
from tests.weights import read_all

GOOD = random_sequences(6)


def _reference_steps(model_dir: Path) -> list[tuple[float, float]]:
    """(loss sum, gradient norm) of five steps in float64, one document at a time."""
    config = TRAINER.model_copy(update={"engine": "local", "num_ranks": 1})
    engine = LocalEngine(config, model_dir, dtype=torch.float64)
    engine.setup()
    results = []
    for step in range(5):
        sequences = random_sequences(seed=step)
        packed = pack_sequences(sequences, dp_size=1, plan=PackingPlan(48, 4, pack=False))
        loss_sum = engine.forward_backward(packed.batches[0], make_loss("grpo")).loss_sum
        results.append((loss_sum, engine.optim_step().grad_norm))
    return results


@pytest.mark.parametrize("pack", [True, False])
def test_two_fsdp_ranks_equal_the_slow_obvious_engine(cluster: Cluster, pack: bool) -> None:
    trainer, dealer = cluster.trainer, cluster.trainer._batches
    plan = dealer._plan
    dealer._plan = dataclasses.replace(plan, pack=pack)
    try:
        for step, (loss_sum, norm) in enumerate(_reference_steps(cluster.model_dir)):
            result = cluster.run(trainer.train_step(random_sequences(seed=step), loss="grpo"))
            metrics = result.forward_backward.metrics
            assert metrics["loss/sum"].value == pytest.approx(loss_sum, rel=1e-5)
            assert result.optim.grad_norm == pytest.approx(norm, rel=1e-5)
    finally:
        dealer._plan = plan


def test_a_rank_with_nothing_but_padding_takes_part(cluster: Cluster) -> None:
    """One sequence for two ranks, against the same sequence in float64."""
    config = TRAINER.model_copy(update={"engine": "local", "num_ranks": 1})
    engine = LocalEngine(config, cluster.model_dir, dtype=torch.float64)
    engine.setup()
    packed = pack_sequences(GOOD[:1], dp_size=1, plan=PackingPlan(48, 1))
    engine.forward_backward(packed.batches[0], make_loss("grpo"))
    result = cluster.run(cluster.trainer.train_step(GOOD[:1], loss="grpo"))
    assert result.optim.grad_norm == pytest.approx(engine.optim_step().grad_norm, rel=1e-5)
    assert result.forward_backward.num_sequences == 1


def test_pushed_weights_give_transformers_the_same_logits(cluster: Cluster) -> None:
    ref = cluster.run(cluster.trainer.push_weights())
    _, tensors = cluster.run(read_all(cluster.store, ref.version))
    given = load_causal_lm(cluster.model_dir, dtype=torch.float32, device=torch.device("cpu"))
    model = load_causal_lm(cluster.model_dir, dtype=torch.float32, device=torch.device("cpu"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[name])
        ids = torch.tensor([[5, 9, 2, 30, 7]])
        torch.testing.assert_close(model(ids).logits, given(ids).logits, rtol=1e-5, atol=1e-5)
    assert ref.num_tensors == len(tensors)
    assert ref.num_bytes == sum(tensor.nbytes for tensor in tensors.values())


def test_the_generator_samples_from_the_weights_it_was_told_to_pull(cluster: Cluster) -> None:
    """After updates, its log-probs are the trainer's at the same version and temperature."""
    for _ in range(2):
        cluster.run(cluster.trainer.train_step(GOOD, loss="grpo"))
    report = cluster.run(sync_weights(cluster.trainer, cluster.generator))
    sampling = SamplingParams(max_completion_tokens=6, temperature=0.7, num_completions=4)

    async def pull_and_sample() -> Any:
        """Requests beside a pull say which weights answered them; after it, the new ones do."""
        await cluster.trainer.train_step(GOOD, loss="grpo")
        ref = await cluster.trainer.push_weights()
        beside, _ = await asyncio.gather(
            cluster.generator.generate(["3,7:"], sampling), cluster.generator.pull_weights(ref)
        )
        versions = {c.policy_version for c in beside[0]}
        assert len(versions) == 1
        assert versions <= {report.ref.version.policy_version, ref.version.policy_version}
        return await cluster.generator.generate(["3,7:", "a longer one"], sampling)

    groups = cluster.run(pull_and_sample())
    completions = [completion for group in groups for completion in group]
    assert {c.policy_version for c in completions} == {report.ref.version.policy_version + 1}
    sequences = [
        TrainSequence(
            [*c.prompt_token_ids, *c.token_ids],
            [0] * len(c.prompt_token_ids) + [1] * len(c.token_ids),
            temperature=c.temperature,
        )
        for c in completions
    ]
    logprobs = cluster.run(cluster.trainer.forward(sequences)).logprobs
    for completion, values in zip(completions, logprobs, strict=True):
        found = values[len(completion.prompt_token_ids) :]
        assert found == pytest.approx(list(completion.logprobs), abs=1e-5)


def test_old_versions_leave_the_store(cluster: Cluster) -> None:
    store = cluster.store
    refs = []
    for _ in range(3):
        cluster.run(cluster.trainer.train_step(GOOD, loss="grpo"))
        refs.append(cluster.run(cluster.trainer.push_weights()))
    newest = [ref.version for ref in refs[-2:]]
    assert cluster.run(cluster.trainer.get_status()).held == newest

    async def wait_until_dropped() -> None:
        # Old versions go after the push has returned.
        async with asyncio.timeout(A_HANG_S):
            while await store.versions() != newest:
                await asyncio.sleep(0.01)

    cluster.run(wait_until_dropped())
    with pytest.raises(WeightsError, match="do not exist; held: "):
        cluster.run(read_all(store, refs[0].version))


def test_weights_that_are_not_finite_are_never_pushed(cluster: Cluster) -> None:
    store = cluster.store
    cluster.run(cluster.trainer.push_weights())
    before = cluster.run(cluster.trainer.get_status()).held
    # The norm weights of 1 go to -3.3e38 by decay and beyond what float32 holds by the gradient.
    huge = OptimParams(lr=3e37, weight_decay=11.0, eps=1e-30)
    cluster.run(cluster.trainer.train_step(GOOD, loss="grpo", params=huge))
    with pytest.raises(WeightsError, match="e.*v1: .* is not finite; not published"):
        cluster.run(cluster.trainer.push_weights())
    assert cluster.run(cluster.trainer.get_status()).held == before
    assert set(before) <= set(cluster.run(store.versions()))


@dataclass(frozen=True)
class GatedLoss:
    """A loss that waits at a gate."""

    gate: FileGate

    def __call__(self, logprobs_BT: torch.Tensor, batch: TrainBatch) -> LossOutput:
        self.gate.pass_through()
        return LossOutput(total=logprobs_BT.sum())


def test_status_answers_while_a_step_runs(cluster: Cluster, tmp_path: Path) -> None:
    gate = FileGate(tmp_path)

    async def scenario() -> None:
        loss = GatedLoss(gate)
        step = asyncio.create_task(cluster.trainer.forward_backward(GOOD[:1], loss=loss))
        await gate.reached()
        for _ in range(5):
            assert (await cluster.trainer.get_status()).phase == "forward_backward"
        assert not step.done()
        gate.open()
        await step
        assert (await cluster.trainer.get_status()).phase == "idle"

    cluster.run(scenario())


def loss_failing_on_rank_1(logprobs_BT: torch.Tensor, batch: TrainBatch) -> LossOutput:
    if dist.get_rank() == 1:
        raise KeyError("a column that only rank 1 lacks")
    return LossOutput(total=logprobs_BT.sum())


def test_a_loss_that_fails_on_one_rank_is_an_error_on_all(cluster: Cluster) -> None:
    wanted = cluster.run(
        cluster.trainer.train_step(GOOD, loss="grpo", params=OptimParams(lr=0.0, weight_decay=0.0))
    ).optim.grad_norm
    with pytest.raises(EngineError, match="a column that only rank 1 lacks") as caught:
        cluster.run(cluster.trainer.forward_backward(GOOD, loss=loss_failing_on_rank_1))
    assert caught.value.rank == 1
    again = cluster.run(cluster.trainer.train_step(GOOD, loss="grpo")).optim
    assert (again.grad_norm, again.step) == (wanted, 2)


def _metric_differs(logprobs_BT: torch.Tensor, batch: TrainBatch) -> LossOutput:
    kind = Mean(1.0, 1.0) if dist.get_rank() == 0 else Max(1.0)
    return LossOutput(total=-logprobs_BT.sum(), metrics={"loss/x": kind})


def _metric_fails_on_rank_0(logprobs_BT: torch.Tensor, batch: TrainBatch) -> LossOutput:
    value = torch.ones(2 if dist.get_rank() == 0 else 1)
    return LossOutput(
        total=-logprobs_BT.sum(),
        metrics={"loss/x": Max(value)},  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("loss", [_metric_differs, _metric_fails_on_rank_0])
def test_metrics_that_fail_leave_no_rank_with_a_gradient(cluster: Cluster, loss: Any) -> None:
    """One rank dropped its gradient, the other kept it, and the next step used half of one."""
    still = OptimParams(lr=0.0, weight_decay=0.0)
    wanted = cluster.run(cluster.trainer.train_step(GOOD, loss="grpo", params=still)).optim
    with pytest.raises(EngineError):
        cluster.run(cluster.trainer.train_step(GOOD, loss=loss))
    assert cluster.run(cluster.trainer.get_status()).accumulated_tokens == 0
    again = cluster.run(cluster.trainer.train_step(GOOD, loss="grpo", params=still)).optim
    assert again.grad_norm == wanted.grad_norm


def test_a_loss_that_cannot_be_sent_is_refused_and_the_trainer_goes_on(cluster: Cluster) -> None:
    """The handle had counted the call before it failed; the ranks then refused all others."""
    lock = threading.Lock()

    def loss(logprobs_BT: torch.Tensor, batch: TrainBatch) -> LossOutput:
        with lock:
            return LossOutput(total=logprobs_BT.sum())

    with pytest.raises(DataError, match="cannot be sent to another process"):
        cluster.run(cluster.trainer.forward_backward(GOOD, loss=loss))
    assert cluster.run(cluster.trainer.train_step(GOOD, loss="grpo")).optim.step == 1


def test_a_save_that_fails_on_one_rank_is_an_error_on_all(cluster: Cluster, tmp_path: Path) -> None:
    """Rank 0 failed to make the folder while the others waited in a barrier: the mesh was lost."""
    with pytest.raises(CheckpointError, match="/proc/x"):
        cluster.run(cluster.trainer.save(path="/proc/x/y"))
    saved = cluster.run(cluster.trainer.save(path=str(tmp_path / "saved")))
    shard = max(Path(saved.path, "weights").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=f"{shard.name} is damaged"):
        cluster.run(cluster.trainer.load(path=saved.path))
    assert cluster.run(cluster.trainer.train_step(GOOD, loss="grpo")).optim.step == 1


def test_bad_data_is_refused_and_the_trainer_goes_on(cluster: Cluster) -> None:
    bad = dataclasses.replace(GOOD[0], loss_mask=[1] * len(GOOD[0]))
    with pytest.raises(DataError, match="sequence 0: loss_mask marks the first token"):
        cluster.run(cluster.trainer.train_step([bad], loss="grpo"))
    with pytest.raises(DataError, match="no target token"):
        cluster.run(cluster.trainer.optim_step())
    assert cluster.run(cluster.trainer.train_step(GOOD, loss="grpo")).optim.step == 1


def test_concurrent_callers_give_the_result_of_one_after_the_other(cluster: Cluster) -> None:
    """Without the handle's lock, both forward_backwards come before the first optim_step."""
    trainer, still = cluster.trainer, OptimParams(lr=0.0, weight_decay=0.0)
    parts = [GOOD[:2], GOOD[2:]]

    async def step(part: list[TrainSequence]) -> float:
        result = await trainer.train_step(part, loss="reinforce", params=still)
        return result.optim.grad_norm

    async def at_once() -> list[float]:
        return await asyncio.gather(*(step(part) for part in parts))

    one_after_the_other = [cluster.run(step(part)) for part in parts]
    assert cluster.run(at_once()) == one_after_the_other


def test_a_second_handle_is_refused_on_every_rank(cluster: Cluster) -> None:
    """Its calls could reach the ranks in another order, which gave wrong sums in a probe."""
    ranks = cluster.trainer._ranks
    assert isinstance(ranks, MeshRanks)
    intruder = MeshRanks.__new__(MeshRanks)
    intruder.__dict__.update(ranks.__dict__, _handle_id="intruder", _number=0)
    with pytest.raises(EngineError, match="only one handle may drive a trainer"):
        cluster.run(intruder.call("clear_gradients", [(), ()]))
    assert cluster.run(cluster.trainer.train_step(GOOD, loss="grpo")).optim.step == 1


def test_training_continues_from_a_checkpoint_as_if_nothing_happened(
    cluster: Cluster, tmp_path: Path
) -> None:
    def step(seed: int) -> float:
        sequences = random_sequences(seed=seed)
        norm: float = cluster.run(
            cluster.trainer.train_step(sequences, loss="grpo")
        ).optim.grad_norm
        return norm

    step(0)
    saved = cluster.run(cluster.trainer.save(path=str(tmp_path / "saved")))
    straight = [step(1), step(2)]
    loaded = cluster.run(cluster.trainer.load(path=saved.path))
    assert (saved.step, loaded.step, saved.complete) == (1, 1, True)
    assert [step(1), step(2)] == straight


def test_config_names_every_rank(cluster: Cluster) -> None:
    facts = cluster.run(cluster.trainer.get_config())
    assert [rank.coordinates["dp"] for rank in facts.ranks] == [0, 1]
    assert len({rank.pid for rank in facts.ranks}) == 2
    assert facts.dp_size == 2


def test_a_load_opens_a_new_epoch(cluster: Cluster) -> None:
    first: WeightsVersion = cluster.run(cluster.trainer.push_weights()).version
    cluster.run(cluster.trainer.load(name="initial"))
    second: WeightsVersion = cluster.run(cluster.trainer.push_weights()).version
    assert second.policy_version == first.policy_version == 0
    assert second.epoch == first.epoch + 1
