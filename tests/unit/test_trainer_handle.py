"""The trainer's handle in-process: validation, order, checkpoints, weights, generator."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from forge_trainer.config import GeneratorConfig, TrainerConfig, WeightsConfig
from forge_trainer.controller.in_process import start_in_process_trainer
from forge_trainer.errors import (
    ConfigError,
    DataError,
    EngineError,
    ForgeTrainerError,
    NonFiniteError,
    WeightsError,
)
from forge_trainer.functional.losses.tokens import document_means
from forge_trainer.functional.pieces import manifests
from forge_trainer.generation import make_generator
from forge_trainer.generation.transformers.model import DecodingModel
from forge_trainer.metrics import Mean, Sum
from forge_trainer.pieces import WeightsRef, WeightsVersion
from forge_trainer.types import LossOutput, OptimParams, SamplingParams, TrainBatch, TrainSequence
from forge_trainer.weights import reading
from forge_trainer.weights.reading import ArrivedWeights
from tests.data import random_sequences, same_numbers
from tests.unit.conftest import CONFIG, GOOD, Bench
from tests.waiting import Gate
from tests.weights import read_all


def _long(length: int) -> TrainSequence:
    zeros = [0.0] * length
    return TrainSequence(
        [1] * length, [0] + [1] * (length - 1), advantages=zeros, generator_logprobs=zeros
    )


@pytest.mark.parametrize(
    "bad",
    [
        [],
        [dataclasses.replace(GOOD[0], loss_mask=[0])],
        [dataclasses.replace(GOOD[0], loss_mask=[1] * len(GOOD[0]))],
        [dataclasses.replace(GOOD[0], token_ids=[260] * len(GOOD[0]))],
        [dataclasses.replace(GOOD[0], advantages=[math.nan] * len(GOOD[0]))],
        [dataclasses.replace(GOOD[0], generator_logprobs=None)],
        [dataclasses.replace(GOOD[0], advantages=[1e39] * len(GOOD[0]))],
        [dataclasses.replace(GOOD[0], advantages=1.0)],  # type: ignore[arg-type]
        [dataclasses.replace(GOOD[0], token_ids=[[1]] * len(GOOD[0]))],  # type: ignore[arg-type]
        [dataclasses.replace(GOOD[0], temperature=1e-40)],
        [_long(65)],
    ],
    ids=[
        "empty",
        "lengths",
        "first token",
        "vocabulary",
        "nan",
        "field missing",
        "overflow",
        "scalar",
        "nested",
        "temperature",
        "too long",
    ],
)
def test_bad_data_never_reaches_the_engine(
    bench: Bench, bad: list[TrainSequence], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []
    ranks = bench.trainer._ranks
    call = ranks.call

    async def recorded(method: str, args: Any) -> Any:
        sent.append(method)
        return await call(method, args)

    monkeypatch.setattr(ranks, "call", recorded)
    with pytest.raises(DataError):
        bench.run(bench.trainer.forward_backward(bad, loss="grpo"))
    assert sent == []
    assert bench.run(bench.trainer.train_step(GOOD, loss="grpo")).optim.step == 1


def test_unknown_losses_never_reach_the_engine(bench: Bench) -> None:
    with pytest.raises(ConfigError, match="not registered"):
        bench.run(bench.trainer.forward_backward(GOOD, loss="gpo"))


def test_train_step_is_forward_backward_and_optim_step(bench: Bench) -> None:
    trainer = bench.trainer
    bench.run(trainer.forward_backward(GOOD, loss="reinforce"))
    apart = bench.run(trainer.optim_step(params=OptimParams(lr=0.0)))
    together = bench.run(
        trainer.train_step(GOOD, loss="reinforce", params=OptimParams(lr=0.0))
    ).optim
    assert together.grad_norm == apart.grad_norm
    assert (apart.step, together.step) == (1, 2)


def test_concurrent_callers_give_the_result_of_one_after_the_other(bench: Bench) -> None:
    trainer, still = bench.trainer, OptimParams(lr=0.0)
    parts = [GOOD[:1], GOOD[1:]]

    async def one_after_the_other() -> float:
        for part in parts:
            await trainer.forward_backward(part, loss="reinforce")
        return (await trainer.optim_step(params=still)).grad_norm

    async def at_once() -> float:
        calls = [trainer.forward_backward(part, loss="reinforce") for part in parts]
        await asyncio.gather(*calls)
        return (await trainer.optim_step(params=still)).grad_norm

    assert bench.run(at_once()) == pytest.approx(bench.run(one_after_the_other()), rel=1e-6)


def test_train_steps_of_two_callers_do_not_mix(bench: Bench) -> None:
    async def both() -> list[int]:
        calls = [bench.trainer.train_step(GOOD, loss="reinforce") for _ in range(2)]
        return [result.optim.step for result in await asyncio.gather(*calls)]

    assert sorted(bench.run(both())) == [1, 2]


def test_clear_gradients_drops_what_was_accumulated(bench: Bench) -> None:
    bench.run(bench.trainer.forward_backward(GOOD, loss="reinforce"))
    with_targets = sum(any(sequence.loss_mask) for sequence in GOOD)
    assert bench.run(bench.trainer.get_status()).accumulated_sequences == with_targets
    bench.run(bench.trainer.clear_gradients())
    status = bench.run(bench.trainer.get_status())
    assert (status.accumulated_sequences, status.accumulated_tokens) == (0, 0)
    with pytest.raises(DataError, match="no target token"):
        bench.run(bench.trainer.optim_step())


def test_status_answers_while_a_step_runs(bench: Bench) -> None:
    gate = Gate()

    def slow(logprobs_BT: torch.Tensor, batch: TrainBatch) -> LossOutput:
        gate.pass_through()
        return LossOutput(total=logprobs_BT.sum())

    async def scenario() -> None:
        step = asyncio.create_task(bench.trainer.forward_backward(GOOD[:1], loss=slow))
        await gate.reached()
        status = await bench.trainer.get_status()
        assert (status.phase, status.step) == ("forward_backward", 0)
        gate.open()
        await step
        assert (await bench.trainer.get_status()).phase == "idle"

    bench.run(scenario())


def test_a_users_loss_that_fails_says_so_and_the_trainer_goes_on(bench: Bench) -> None:
    def broken(logprobs_BT: torch.Tensor, batch: TrainBatch) -> LossOutput:
        raise KeyError("no such column")

    with pytest.raises(EngineError, match="no such column"):
        bench.run(bench.trainer.forward_backward(GOOD, loss=broken))
    assert "no such column" in bench.run(bench.trainer.get_status()).last_error
    assert bench.run(bench.trainer.train_step(GOOD, loss="grpo")).optim.step == 1


def _nan(logprobs_BT: torch.Tensor, batch: TrainBatch) -> LossOutput:
    return LossOutput(total=(logprobs_BT * math.nan).sum())


def _mean(logprobs_BT: torch.Tensor, batch: TrainBatch) -> LossOutput:
    return LossOutput(total=-logprobs_BT[batch.loss_mask_BT].mean())


def _per_token(logprobs_BT: torch.Tensor, batch: TrainBatch) -> LossOutput:
    return LossOutput(total=-logprobs_BT)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (_nan, "total is nan"),
        (_mean, "must be a sum over tokens: its gradient changes by a factor of 0.5"),
        (_per_token, "must be a 0-dim tensor"),
    ],
)
def test_a_users_loss_must_be_a_finite_sum(bench: Bench, loss: Any, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        bench.run(bench.trainer.forward_backward(GOOD, loss=loss))
    assert bench.run(bench.trainer.train_step(GOOD, loss="grpo")).optim.step == 1


def _zero_sum(logprobs_BT: torch.Tensor, batch: TrainBatch) -> LossOutput:
    """On-policy with centred advantages the total is nothing but rounding."""
    return LossOutput(total=(batch.loss_mask_BT * (logprobs_BT - logprobs_BT.detach())).sum())


def _of_nothing(logprobs_BT: torch.Tensor, batch: TrainBatch) -> LossOutput:
    return LossOutput(total=0.0 * logprobs_BT.sum())


@pytest.mark.parametrize("loss", [_zero_sum, _of_nothing])
def test_a_total_of_zero_is_a_sum_like_any_other(bench: Bench, loss: Any) -> None:
    """Totals were compared, and cancelled to rounding: a user's GRPO failed on its first step."""
    assert bench.run(bench.trainer.train_step(GOOD, loss=loss)).optim.step == 1


def _infinite(logprobs_BT: torch.Tensor, batch: TrainBatch) -> LossOutput:
    return LossOutput(total=-(logprobs_BT * batch.loss_mask_BT * 3e38 * 3e38).sum())


def test_a_users_loss_that_overflows_is_skipped_where_that_is_asked_for(
    tiny_qwen3: Path, tmp_path: Path
) -> None:
    config = CONFIG.model_copy(update={"engine": "local", "on_non_finite": "skip"})

    async def scenario() -> None:
        trainer = await start_in_process_trainer(
            config, model_dir=tiny_qwen3, checkpoint_folder=tmp_path
        )
        assert (await trainer.train_step(GOOD, loss=_infinite)).optim.skipped
        assert (await trainer.train_step(GOOD, loss="grpo")).optim.step == 1
        await trainer.close()

    asyncio.run(scenario())


def _vector_metric(logprobs_BT: torch.Tensor, batch: TrainBatch) -> LossOutput:
    return LossOutput(
        total=-logprobs_BT.sum(),
        metrics={"x": Mean(torch.ones(2), 1)},  # type: ignore[arg-type]
    )


def test_closing_one_trainer_leaves_the_others(tiny_qwen3: Path, tmp_path: Path) -> None:
    """The first one to close ended the process group of all."""

    async def scenario() -> None:
        one, other = [
            await start_in_process_trainer(CONFIG, model_dir=tiny_qwen3, checkpoint_folder=tmp_path)
            for _ in range(2)
        ]
        await one.close()
        assert (await other.train_step(GOOD, loss="grpo")).optim.step == 1
        await other.close()
        assert not dist.is_initialized()

    asyncio.run(scenario())


def test_a_close_that_was_cancelled_can_be_repeated(tiny_qwen3: Path, tmp_path: Path) -> None:
    """It was taken for done, and the trainer lived on."""

    async def scenario() -> None:
        trainer = await start_in_process_trainer(
            CONFIG, model_dir=tiny_qwen3, checkpoint_folder=tmp_path
        )
        gate = Gate()

        def slow(logprobs_BT: torch.Tensor, batch: TrainBatch) -> LossOutput:
            gate.pass_through()
            return LossOutput(total=-logprobs_BT.sum())

        step = asyncio.create_task(trainer.train_step(GOOD, loss=slow))
        await gate.reached()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(trainer.close(), 0.01)
        gate.open()
        await asyncio.gather(trainer.close(), trainer.close())
        assert step.done()
        with pytest.raises(EngineError, match="this trainer is closed"):
            await trainer.forward(GOOD)
        assert not dist.is_initialized()

    asyncio.run(scenario())


def _mean_over_sequences_of_means(logprobs_BT: torch.Tensor, batch: TrainBatch) -> LossOutput:
    """A sum over documents of each document's mean is a sum, too."""
    means_BT = document_means(logprobs_BT, batch)
    counts_BT = document_means(torch.ones_like(logprobs_BT), batch)
    return LossOutput(total=-(means_BT * counts_BT)[batch.loss_mask_BT].sum())


def test_a_users_loss_may_look_at_whole_documents(bench: Bench) -> None:
    result = bench.run(bench.trainer.train_step(GOOD, loss=_mean_over_sequences_of_means))
    assert result.optim.step == 1


def test_a_gradient_that_overflows_is_refused_at_the_step(bench: Bench) -> None:
    huge = [dataclasses.replace(s, advantages=[3e38] * len(s)) for s in GOOD]
    before = bench.run(bench.trainer.forward(GOOD)).logprobs
    bench.run(bench.trainer.forward_backward(huge, loss="reinforce"))
    with pytest.raises(NonFiniteError, match="parameters are untouched"):
        bench.run(bench.trainer.optim_step())
    assert same_numbers(bench.run(bench.trainer.forward(GOOD)).logprobs, before)
    assert bench.run(bench.trainer.train_step(GOOD, loss="grpo")).optim.step == 1


def test_forward_returns_logprobs_of_the_generator(bench: Bench) -> None:
    """At the same version and temperature, after an update, for ragged prompts."""
    bench.run(bench.trainer.train_step(GOOD, loss="grpo"))
    ref = bench.run(bench.trainer.push_weights())
    bench.run(bench.generator.pull_weights(ref))
    sampling = SamplingParams(max_completion_tokens=6, temperature=0.7, num_completions=3)
    groups = bench.run(bench.generator.generate(["3,7:", "a longer"], sampling))
    completions = [completion for group in groups for completion in group]
    assert len(completions) == 6
    sequences = [
        TrainSequence(
            [*c.prompt_token_ids, *c.token_ids],
            [0] * len(c.prompt_token_ids) + [1] * len(c.token_ids),
            temperature=c.temperature,
        )
        for c in completions
    ]
    logprobs = bench.run(bench.trainer.forward(sequences)).logprobs
    for completion, values in zip(completions, logprobs, strict=True):
        found = values[len(completion.prompt_token_ids) :]
        assert found == pytest.approx(list(completion.logprobs), abs=1e-5)
        assert completion.policy_version == 1


def test_the_same_seed_samples_the_same(bench: Bench, tiny_qwen3: Path) -> None:
    twin = make_generator(
        GeneratorConfig(device="cpu", batch_size=2, seed=7), WeightsConfig(), model_dir=tiny_qwen3
    )
    bench.run(twin.setup())
    sampling = SamplingParams(max_completion_tokens=4, num_completions=4)
    first = bench.run(twin.generate(["3,7:"], sampling))
    torch.manual_seed(123)  # someone else's randomness must not matter
    second = bench.run(twin.generate(["3,7:"], sampling))
    assert first != second
    bench.run(twin.setup())
    assert bench.run(twin.generate(["3,7:"], sampling)) == first
    bench.run(twin.close())


def test_equal_prompts_are_prefilled_once_and_keep_their_distribution(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of many lengths in one batch, whose first tokens are computed once per group."""
    sampling = SamplingParams(max_completion_tokens=5, temperature=0.7, num_completions=3)
    groups = bench.run(bench.generator.generate(["7", "3,7:", "12345678", "3,7:"], sampling))
    sequences = [
        TrainSequence(
            np.concatenate([c.prompt_token_ids, c.token_ids]),
            np.arange(len(c.prompt_token_ids) + len(c.token_ids)) >= len(c.prompt_token_ids),
            temperature=c.temperature,
        )
        for group in groups
        for c in group
    ]
    found = bench.run(bench.trainer.forward(sequences)).logprobs
    completions = [c for group in groups for c in group]
    for c, logprobs in zip(completions, found, strict=True):
        np.testing.assert_allclose(logprobs[len(c.prompt_token_ids) :], c.logprobs, atol=1e-5)
    assert len({tuple(c.token_ids) for c in completions}) > 3
    prefill, computed = DecodingModel.prefill, []

    def watched(model: Any, rows: Any) -> Any:
        computed.append([len(row) for row in rows])
        return prefill(model, rows)

    monkeypatch.setattr(DecodingModel, "prefill", watched)
    few = SamplingParams(max_completion_tokens=2, num_completions=3)
    bench.run(bench.generator.generate(["3,7:", "7", "3,7:"], few))
    assert computed == [[1, 4]]


def test_prompts_that_do_not_fit_are_data_errors(bench: Bench) -> None:
    sampling = SamplingParams(max_completion_tokens=4)
    with pytest.raises(DataError, match="has 9 tokens, generator.max_prompt_tokens is 8"):
        bench.run(bench.generator.generate(["123456789"], sampling))
    with pytest.raises(DataError, match="no tokens"):
        bench.run(bench.generator.generate([""], sampling))


def test_versions_are_published_once_in_order_and_old_ones_dropped(bench: Bench) -> None:
    trainer = bench.trainer
    refs = [bench.run(trainer.push_weights())]
    with pytest.raises(WeightsError, match="e0v0 are published already"):
        bench.run(trainer.push_weights())
    with pytest.raises(WeightsError, match="policy_version 5 is not the current step 0"):
        bench.run(trainer.push_weights(policy_version=5))
    for _ in range(3):
        bench.run(trainer.train_step(GOOD, loss="grpo"))
        refs.append(bench.run(trainer.push_weights()))
    assert bench.run(bench.store.versions()) == [ref.version for ref in refs[-2:]]
    status = bench.run(trainer.get_status())
    assert (status.published, status.held) == (refs[-1].version, [r.version for r in refs[-2:]])
    assert status.push.num_bytes == refs[-1].num_bytes
    assert status.push.gb_per_s > 0
    assert bench.run(bench.generator.get_status()).pull is None
    bench.run(bench.generator.pull_weights(refs[-1]))
    assert bench.run(bench.generator.get_status()).pull.num_bytes == refs[-1].num_bytes
    with pytest.raises(WeightsError, match="e0v2 are older than e0v3"):
        bench.run(bench.generator.pull_weights(refs[-2]))


def test_a_failed_pull_leaves_the_old_weights(bench: Bench) -> None:
    ref = bench.run(bench.trainer.push_weights())
    bench.run(bench.generator.pull_weights(ref))
    gone = dataclasses.replace(ref, version=WeightsVersion(0, 9))
    with pytest.raises(WeightsError, match="e0v9 do not exist"):
        bench.run(bench.generator.pull_weights(gone))
    bench.run(bench.trainer.train_step(GOOD, loss="grpo"))
    torn: WeightsRef = bench.run(bench.trainer.push_weights())
    location = bench.store._manifests[torn.version].parts[0].location
    bench.store._pieces[location][0].view(torch.uint8)[0] ^= 1
    before = [p.clone() for p in bench.generator._backend.tensors.values()]
    with pytest.raises(WeightsError, match="checksum"):
        bench.run(bench.generator.pull_weights(torn))
    after = list(bench.generator._backend.tensors.values())
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert bench.run(bench.generator.get_status()).version == ref.version


def test_a_failed_push_leaves_the_last_version(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, store = bench.trainer, bench.store
    bench.run(trainer.push_weights())
    bench.run(trainer.train_step(GOOD, loss="grpo"))
    pieces = dict(store._pieces)

    async def disk_full(*_: Any) -> Any:
        raise OSError("no space")

    with monkeypatch.context() as patched:
        patched.setattr(store, "commit", disk_full)
        with pytest.raises(OSError, match="no space"):
            bench.run(trainer.push_weights())
    assert bench.run(store.versions()) == [WeightsVersion(0, 0)]
    assert store._pieces.keys() == pieces.keys()
    assert bench.run(trainer.push_weights()).version == WeightsVersion(0, 1)


def test_a_cancelled_push_is_published_whole(bench: Bench) -> None:
    trainer, store = bench.trainer, bench.store

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(trainer.push_weights(), 1e-6)

    bench.run(give_up())
    version = WeightsVersion(0, 0)
    assert bench.run(trainer.get_status()).published == version
    _, tensors = bench.run(read_all(store, version))
    assert len(tensors) > 10


@pytest.mark.parametrize("moment", ["reading", "loading"])
def test_a_cancelled_pull_ends_before_its_caller_goes_on(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    bench.run(bench.trainer.train_step(GOOD, loss="grpo"))
    ref = bench.run(bench.trainer.push_weights())
    generator = bench.generator
    old = [p.clone() for p in generator._backend.tensors.values()]
    gate = Gate()
    if moment == "reading":
        read = bench.store.reading

        @contextlib.asynccontextmanager
        async def slow_reading(*args: Any) -> AsyncIterator[Any]:
            await asyncio.to_thread(gate.pass_through)
            async with read(*args) as reading:
                yield reading

        monkeypatch.setattr(bench.store, "reading", slow_reading)
    else:
        copy = ArrivedWeights._copy

        def slow_copy(*args: Any) -> None:
            gate.pass_through()
            copy(*args)

        monkeypatch.setattr(ArrivedWeights, "_copy", slow_copy)

    async def cancel() -> None:
        pull = asyncio.create_task(generator.pull_weights(ref))
        await gate.reached()
        pull.cancel()
        gate.open()
        with pytest.raises(asyncio.CancelledError):
            await pull
        # A request is answered by whatever is in use now, once it is there.
        await generator.generate(["3,7:"], SamplingParams(max_completion_tokens=1))

    bench.run(cancel())
    assert bench.run(generator.get_status()).version == ref.version
    changed = [
        not torch.equal(p, q) for p, q in zip(generator._backend.tensors.values(), old, strict=True)
    ]
    assert any(changed)


def test_generating_goes_on_while_a_pull_fetches_and_verifies(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fetching once held the generator's turn, so that it stood still for seconds per update."""
    bench.run(bench.trainer.train_step(GOOD, loss="grpo"))
    ref = bench.run(bench.trainer.push_weights())
    gate = Gate()
    verify = manifests.require_checksums

    def slow_verify(*args: Any) -> None:
        gate.pass_through()
        verify(*args)

    monkeypatch.setattr(reading, "require_checksums", slow_verify)
    sampling = SamplingParams(max_completion_tokens=1)

    async def generate_meanwhile() -> list[int]:
        pull = asyncio.create_task(bench.generator.pull_weights(ref))
        await gate.reached()
        [[before]] = await bench.generator.generate(["3,7:"], sampling)
        gate.open()
        await pull
        [[after]] = await bench.generator.generate(["3,7:"], sampling)
        return [before.policy_version, after.policy_version]

    assert bench.run(generate_meanwhile()) == [0, 1]


def test_published_weights_do_not_alias_live_ones(bench: Bench) -> None:
    bench.run(bench.trainer.push_weights())
    _, before = bench.run(read_all(bench.store))
    bench.run(bench.trainer.train_step(GOOD, loss="grpo"))
    _, after = bench.run(read_all(bench.store))
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_a_load_opens_a_new_weights_epoch(bench: Bench) -> None:
    trainer = bench.trainer
    bench.run(trainer.train_step(GOOD, loss="grpo"))
    bench.run(trainer.save())
    assert bench.run(trainer.push_weights()).version == WeightsVersion(0, 1)
    bench.run(trainer.load())
    assert bench.run(trainer.push_weights()).version == WeightsVersion(1, 1)


def test_config_tells_the_static_facts(bench: Bench, tiny_qwen3: Path) -> None:
    facts = bench.run(bench.trainer.get_config())
    assert (facts.model_type, facts.vocab_size, facts.max_sequence_tokens) == ("qwen3", 260, 64)
    assert facts.model_path == str(tiny_qwen3)
    assert [rank.coordinates for rank in facts.ranks] == [{"dp": 0, "tp": 0, "pp": 0}]
    assert facts.library_versions["torchtitan"] == "0.3.0"
    assert facts.model_config["num_hidden_layers"] == 2
    assert facts.degrees == {"data_shard": 1, "data_replicate": 1, "tensor": 1, "pipeline": 1}


def test_a_step_tells_what_it_costs(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds of its phases, memory, tokens per second; MFU where the device's peak is known."""
    result = bench.run(bench.trainer.train_step(GOOD, loss="grpo"))
    fb, optim = result.forward_backward.metrics, result.optim.metrics
    seconds = fb["time/forward_backward_s"].value
    assert seconds > 0
    assert optim["time/optim_step_s"].value > 0
    assert 0.05 < fb["memory/peak_gb"].value < 100
    tokens = sum(len(sequence) for sequence in GOOD)
    assert fb["trainer/tokens_per_s_per_rank"].value == pytest.approx(tokens / seconds)
    assert "trainer/mfu" not in fb
    dealer = bench.trainer._batches
    facts = dataclasses.replace(
        dealer._facts[0],
        peak_flops=1e12,
        num_matmul_parameters=1000,
        num_layers=2,
        attention_width=16,
    )
    monkeypatch.setattr(dealer, "_facts", [facts])
    fb = bench.run(bench.trainer.forward_backward(GOOD, loss="grpo")).metrics
    pairs = sum(len(sequence) ** 2 for sequence in GOOD)
    wanted = (6e3 * tokens + 12 * 2 * 16 * pairs) / fb["time/forward_backward_s"].value / 1e12
    assert fb["trainer/mfu"].value == pytest.approx(wanted)


def custom_loss(logprobs_BT: torch.Tensor, batch: TrainBatch, *, bonus: float) -> LossOutput:
    """Weighs tokens by a column of the sequences' own."""
    weighted_BT = logprobs_BT * batch.extra["score"] * batch.loss_mask_BT
    return LossOutput(-bonus * weighted_BT.sum(), {"loss/turns": Sum(batch.extra["turn"].sum())})  # type: ignore[arg-type]


def test_extra_columns_reach_a_loss_that_is_named(bench: Bench) -> None:
    name = f"{__name__}:custom_loss"
    sequences = [
        dataclasses.replace(s, extra={"score": [0.5] * len(s), "turn": [3] * len(s)}) for s in GOOD
    ]
    still = OptimParams(lr=0.0, max_grad_norm=1e9)
    result = bench.run(
        bench.trainer.train_step(sequences, loss=name, loss_config={"bonus": 4.0}, params=still)
    )
    wanted = bench.run(bench.trainer.train_step(GOOD, loss="cross_entropy", params=still))
    assert result.optim.grad_norm == pytest.approx(2 * wanted.optim.grad_norm, rel=1e-5)
    turns = result.forward_backward.metrics["loss/turns"].value
    assert turns == 3 * sum(len(sequence) for sequence in GOOD)
    with pytest.raises(ConfigError, match="cannot be called with .*missing a required .*'bonus'"):
        bench.run(bench.trainer.train_step(sequences, loss=name))
    with pytest.raises(ConfigError, match="'tests.unit.nothing:loss' cannot be imported"):
        bench.run(bench.trainer.train_step(sequences, loss="tests.unit.nothing:loss"))


def test_errors_of_the_handle_are_ours(bench: Bench) -> None:
    """Whatever goes wrong in an engine call has a rank and a phase."""

    def out_of_memory() -> None:
        raise MemoryError("no room")

    worker = bench.trainer._ranks._worker  # type: ignore[attr-defined]
    worker._engine.clear_gradients = out_of_memory
    told = r"out of memory on rank 0 in clear_gradients: no room; .*\(rank 0, phase clear_"
    with pytest.raises(ForgeTrainerError, match=told):
        bench.run(bench.trainer.clear_gradients())


def test_a_cancelled_call_runs_to_its_end_and_is_counted(bench: Bench) -> None:
    """The handle used to forget the step, and to publish it under the version before."""
    trainer, gate = bench.trainer, Gate()

    def slow(logprobs_BT: torch.Tensor, batch: TrainBatch) -> LossOutput:
        gate.pass_through()
        return LossOutput(total=-logprobs_BT.sum())

    async def give_up() -> None:
        call = asyncio.create_task(trainer.train_step(GOOD, loss=slow))
        await gate.reached()
        call.cancel()
        gate.open()
        with pytest.raises(asyncio.CancelledError):
            await call

    bench.run(give_up())
    assert bench.run(trainer.get_status()).step == 1
    assert bench.run(trainer.get_status()).accumulated_tokens == 0
    assert bench.run(trainer.push_weights()).version == WeightsVersion(0, 1)
    assert bench.run(trainer.save()).step == 1


def _bad_metric(logprobs_BT: torch.Tensor, batch: TrainBatch) -> LossOutput:
    return LossOutput(total=-logprobs_BT.sum(), metrics={"x": 1.0})  # type: ignore[dict-item]


class _FailsInBackward(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        _FailsInBackward.calls += 1
        if _FailsInBackward.calls == 2:
            raise MemoryError("no memory left")
        return grads[0]


def _fails_in_second_backward(logprobs_BT: torch.Tensor, batch: TrainBatch) -> LossOutput:
    return LossOutput(total=-_FailsInBackward.apply(logprobs_BT).sum())


@pytest.mark.parametrize("loss", [_bad_metric, _vector_metric, _fails_in_second_backward])
def test_half_a_gradient_never_reaches_the_next_step(bench: Bench, loss: Any) -> None:
    still = OptimParams(lr=0.0, weight_decay=0.0)
    many = random_sequences(12)
    wanted = bench.run(bench.trainer.train_step(GOOD, loss="grpo", params=still)).optim.grad_norm
    _FailsInBackward.calls = 0
    with pytest.raises(EngineError):
        bench.run(bench.trainer.forward_backward(many, loss=loss))
    assert bench.run(bench.trainer.get_status()).accumulated_tokens == 0
    found = bench.run(bench.trainer.train_step(GOOD, loss="grpo", params=still)).optim.grad_norm
    assert found == wanted


def test_a_new_trainer_on_an_old_store_opens_a_new_epoch(
    bench: Bench, tiny_qwen3: Path, tmp_path: Path
) -> None:
    """It used to start at epoch 0 again and to overwrite what was published."""
    first = bench.run(bench.trainer.push_weights())
    config = CONFIG.model_copy(update={"engine": "local"})
    second = bench.run(
        start_in_process_trainer(
            config, model_dir=tiny_qwen3, checkpoint_folder=tmp_path, store=bench.store
        )
    )
    assert bench.run(second.push_weights()).version > first.version
    bench.run(second.close())
    bench.run(second.close())


@pytest.mark.parametrize(
    "params",
    [{"lr": math.nan}, {"lr": -1.0}, {"max_grad_norm": -1.0}, {"betas": (2.0, 2.0)}, {"eps": 0.0}],
)
def test_optimizer_values_that_cannot_be_meant_are_refused(params: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=next(iter(params))):
        OptimParams(**params)


def test_a_config_that_does_not_fit_the_model_is_refused_in_process(
    tiny_qwen3: Path, tmp_path: Path
) -> None:
    config = TrainerConfig(device="cpu", max_sequence_tokens=1000)
    with pytest.raises(ConfigError, match="max_sequence_tokens: 1000 exceeds"):
        asyncio.run(
            start_in_process_trainer(config, model_dir=tiny_qwen3, checkpoint_folder=tmp_path)
        )
