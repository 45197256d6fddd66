"""What every backend keeps, behind the generator that drives it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forge_trainer.config import VllmConfig, WeightsConfig
from forge_trainer.errors import DataError, EngineError, TornWeightsError, WeightsError
from forge_trainer.generation import make_generator
from forge_trainer.hf import create_tiny_model
from forge_trainer.types import Completion
from forge_trainer.types.arrays import as_array
from forge_trainer.weights.memory import MemoryWeightStore
from tests.generators import CONFIG, MODEL, Subject, ragged_requests, request
from tests.vllm.subject import INSTALL, one_thread, vllm_in_this_process
from tests.waiting import until

TOLERANCES = {"transformers": 1e-5, "vllm": 1e-4}
BACKENDS = ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)]


@pytest.fixture(scope="module", params=BACKENDS)
def started(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Subject]:
    model_dir: Path = create_tiny_model(tmp_path_factory.mktemp("model"), MODEL, seed=0)
    config, surroundings = CONFIG.model_copy(update={"backend": request.param}), one_thread()
    if request.param == "vllm":
        pytest.importorskip("vllm", reason=INSTALL)
        config = config.model_copy(update={"vllm": VllmConfig(kv_cache_gb=0.1)})
        surroundings = vllm_in_this_process()
    with surroundings, asyncio.Runner() as runner:
        generator = make_generator(config, WeightsConfig(), model_dir=model_dir)
        store = MemoryWeightStore()
        generator.use_store(store)
        runner.run(generator.setup())
        yield Subject(generator, store, model_dir, runner, TOLERANCES[request.param])
        runner.run(generator.close())


@pytest.fixture
def subject(started: Subject) -> Iterator[Subject]:
    yield started
    status = started.run(started.generator.get_status())
    assert (status.num_running, status.num_waiting) == (0, 0)
    assert started.backend.num_unfinished == 0


def _tokens(completions: list[Completion]) -> list[list[int]]:
    return [as_array(completion.token_ids).tolist() for completion in completions]


def test_completions_are_as_long_as_asked_or_end_with_a_stop_token(subject: Subject) -> None:
    """40 requests of 1 to 40 tokens over 4 slots."""
    requests = ragged_requests(40)
    completions = subject.run(subject.all_of(requests))
    for asked, completion in zip(requests, completions, strict=True):
        ids = as_array(completion.token_ids).tolist()
        eos = subject.tokenizer.eos_token_id
        assert as_array(completion.prompt_token_ids).tolist() == asked.token_ids
        assert len(ids) == len(completion.logprobs) == len(completion.policy_versions)
        assert eos not in ids[:-1]
        stopped = ids[-1] == eos
        assert completion.stop_reason == ("stop" if stopped else "length")
        assert stopped or len(ids) == asked.sampling.max_completion_tokens
        assert completion.text == subject.tokenizer.decode(ids, skip_special_tokens=True)


def test_a_stop_token_ends_a_completion_and_belongs_to_it(subject: Subject) -> None:
    """At a high temperature, where each of 260 tokens is about as likely."""
    requests = [request(seed=seed, max_completion_tokens=60, temperature=2.0) for seed in range(40)]
    completions = subject.run(subject.all_of(requests))
    stopped = [one for one in completions if one.stop_reason == "stop"]
    assert stopped
    for completion in stopped:
        assert completion.token_ids[-1] == subject.tokenizer.eos_token_id
        assert len(completion.token_ids) <= 60


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_those_of_a_full_forward(subject: Subject, temperature: float) -> None:
    requests = ragged_requests(24, temperature=temperature)
    subject.require_exact(subject.run(subject.all_of(requests)))


def test_greedy_takes_the_likeliest_token(subject: Subject) -> None:
    requests = ragged_requests(12, greedy=True)
    completions = subject.run(subject.all_of(requests))
    for completion in completions:
        version = completion.policy_version
        likeliest = subject.full_forward(completion, version).argmax(-1).tolist()
        assert as_array(completion.token_ids).tolist() == likeliest
    subject.require_exact(completions)


def test_neighbours_change_nothing_but_rounding(subject: Subject) -> None:
    requests = ragged_requests(16)
    together = subject.run(subject.all_of(requests))
    turned = subject.run(subject.all_of(requests[::-1]))[::-1]
    alone = [subject.run(subject.all_of([one]))[0] for one in requests]
    assert _tokens(together) == _tokens(turned) == _tokens(alone)
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=subject.tolerance)


def test_equal_seeds_sample_alike_and_others_do_not(subject: Subject) -> None:
    seeds = [3, 3, 4, 5]
    tokens = _tokens(subject.run(subject.all_of([request(seed=s) for s in seeds])))
    assert tokens[0] == tokens[1]
    assert len({tuple(ids) for ids in tokens}) == 3


def test_a_stop_string_ends_the_text_before_it_and_stays_in_the_tokens(subject: Subject) -> None:
    """Three characters that span tokens, from the midst of what is sampled without."""
    free = [request(seed=seed, max_completion_tokens=40) for seed in range(24)]
    wholes = subject.run(subject.all_of(free))
    stops = [whole.text[5:8] for whole in wholes]
    asked = [
        request(seed=seed, max_completion_tokens=40, stop=("not in the text", stop))
        for seed, stop in enumerate(stops)
    ]
    cuts = subject.run(subject.all_of(asked))
    cut_ids = _tokens(cuts)
    checked = 0
    for whole, ids, stop, cut, kept in zip(
        wholes, _tokens(wholes), stops, cuts, cut_ids, strict=True
    ):
        if "\ufffd" in stop or len(stop) < 3:
            # Bytes that are no UTF-8.
            continue
        parts = [subject.tokenizer.decode(ids[:n]) for n in range(len(ids) + 1)]
        assert kept == ids[: next(n for n, part in enumerate(parts) if stop in part)]
        assert cut.text == whole.text[: whole.text.index(stop)]
        assert cut.stop_reason == "stop"
        assert len(cut.logprobs) == len(kept)
        checked += 1
    assert checked >= 3


@pytest.mark.parametrize(
    ("prompt", "max_completion_tokens", "told"),
    [
        ([], 4, "a prompt has no tokens"),
        ([7] * 41, 4, "a prompt has 41 tokens, generator.max_prompt_tokens is 40"),
        ([7] * 40, 200, "a prompt of 40 tokens and max_completion_tokens=200 exceed"),
        ([7, 260], 4, "token ids from 7 to 260, the model has embeddings for 0 to 259"),
        ([7, -1], 4, "token ids from -1 to 7"),
    ],
)
def test_prompts_that_do_not_fit_are_data_errors(
    subject: Subject, prompt: list[int], max_completion_tokens: int, told: str
) -> None:
    with pytest.raises(DataError, match=told):
        subject.run(subject.generator.generate_one(request(prompt, max_completion_tokens)))


def test_a_stop_string_that_is_empty_is_a_data_error(subject: Subject) -> None:
    with pytest.raises(DataError, match="a stop string is empty"):
        subject.run(subject.generator.generate_one(request(stop=("",))))


def test_texts_are_completed_in_groups_with_seeds_of_their_own(subject: Subject) -> None:
    sampling = request(max_completion_tokens=6, num_completions=3).sampling
    groups = subject.run(subject.generator.generate(["3,7:", "a longer one", "3,7:"], sampling))
    assert [len(group) for group in groups] == [3, 3, 3]
    prompts = [as_array(group[0].prompt_token_ids).tolist() for group in groups]
    assert prompts == [subject.tokenizer.encode(t) for t in ("3,7:", "a longer one", "3,7:")]
    assert len({tuple(ids) for group in groups for ids in _tokens(group)}) == 9
    subject.require_exact([completion for group in groups for completion in group])
    with pytest.raises(DataError, match="has 41 tokens, generator.max_prompt_tokens is 40: 'xxx"):
        subject.run(subject.generator.generate(["3,7:", "x" * 41], sampling))


def test_no_more_requests_run_than_there_are_slots(subject: Subject) -> None:
    async def half_way() -> Any:
        async with subject.paused_after(3) as reached:
            asked = [request(seed=seed, max_completion_tokens=20, greedy=True) for seed in range(9)]
            running = asyncio.create_task(subject.all_of(asked))
            await reached()
            status = await subject.generator.get_status()
            unfinished = subject.backend.num_unfinished
            await subject.generator.resume()
            return status, unfinished, await running

    status, unfinished, completions = subject.run(half_way())
    assert (status.num_running, status.num_waiting, unfinished) == (4, 5, 4)
    assert len(completions) == 9


def test_what_is_paused_goes_on_where_it_was(subject: Subject) -> None:
    requests = ragged_requests(6, longest=30)
    before = subject.run(subject.all_of(requests))

    async def with_a_pause() -> Any:
        async with subject.paused_after(2) as reached:
            running = asyncio.create_task(subject.all_of(requests))
            await reached()
            steps: list[Any] = []
            subject.backend.step, step = lambda: steps.append(1), subject.backend.step
            later = asyncio.create_task(subject.generator.generate_one(request(seed=99)))
            # A turn on the backend's thread after any step that might still come.
            await subject.generator.weight_checksums()
            await subject.generator.weight_checksums()
            subject.backend.step = step
            assert (steps, running.done(), later.done()) == ([], False, False)
            await subject.generator.resume()
            return await running, await later

    after, later = subject.run(with_a_pause())
    assert _tokens(after) == _tokens(before)
    assert len(later.token_ids) == 8


def test_a_cancelled_request_frees_its_slot_and_its_neighbours_go_on(subject: Subject) -> None:
    requests = [request(seed=seed, max_completion_tokens=20 + seed) for seed in range(6)]
    alone = [subject.run(subject.all_of([one]))[0] for one in requests]

    async def cancel_two() -> list[Any]:
        async with subject.paused_after(4) as reached:
            tasks = [
                asyncio.create_task(subject.generator.generate_one(one), name=one.id)
                for one in requests
            ]
            await reached()
            # One that runs, and one that waits.
            for index in (1, 5):
                tasks[index].cancel()
            done = await asyncio.gather(tasks[1], tasks[5], return_exceptions=True)
            assert [type(one) for one in done] == [asyncio.CancelledError] * 2
            await until(lambda: subject.backend.num_unfinished == 3, "a free slot")
            status = await subject.generator.get_status()
            assert (status.num_running, status.num_waiting) == (3, 1)
            await subject.generator.resume()
            return await asyncio.gather(*[tasks[i] for i in (0, 2, 3, 4)])

    completions = subject.run(cancel_two())
    assert _tokens(completions) == _tokens([alone[i] for i in (0, 2, 3, 4)])
    subject.require_exact(completions)


def _in_flight(subject: Subject, **config: Any) -> list[Completion]:
    """Requests that have run for 5 steps when a pull comes, over more requests than slots."""

    async def pull_half_way() -> list[Completion]:
        async with subject.paused_after(5) as reached:
            asked = [
                request([30 + seed] * (3 + seed), seed=seed, max_completion_tokens=16, stop=())
                for seed in range(6)
            ]
            running = asyncio.create_task(subject.all_of(asked))
            await reached()
            version = await subject.publish()
            assert await subject.generator.pull_weights() == version
            await subject.generator.resume()
            return await running

    with subject.using(**config):
        completions: list[Completion] = subject.run(pull_half_way())
    return completions


def _spans(subject: Subject, completion: Completion) -> list[int]:
    """Tokens by version, from the one before the newest."""
    versions = as_array(completion.policy_versions)
    assert np.all(np.diff(versions) >= 0)
    newest = subject._version
    return [int((versions == newest - 1).sum()), int((versions == newest).sum())]


def test_requests_go_on_with_new_weights_and_say_so_token_by_token(subject: Subject) -> None:
    """Keys and values are computed again: both sides agree with a full forward of their version."""
    subject.run(subject.generator.pull_weights(subject.run(subject.publish())))
    completions = _in_flight(subject, update="in_flight")
    subject.require_exact(completions)
    mixed = [_spans(subject, one) for one in completions[:4] if one.stop_reason == "length"]
    assert mixed
    assert all(span == mixed[0] and min(span) >= 4 for span in mixed)
    assert all(_spans(subject, one)[0] == 0 for one in completions[4:])
    assert completions[0].policy_version == subject._version - 1


def test_keys_and_values_that_are_kept_are_an_approximation(subject: Subject) -> None:
    subject.run(subject.generator.pull_weights(subject.run(subject.publish())))
    completions = _in_flight(subject, update="in_flight", kv_cache="keep")
    for completion in completions[:4]:
        old = as_array(completion.policy_versions) == subject._version - 1
        gaps = subject.gaps(completion)
        assert gaps[old].max() <= subject.tolerance
        if not old.all():
            assert gaps[~old].max() > 100 * subject.tolerance
    subject.require_exact(completions[4:])


def test_a_pull_lets_what_runs_end_first(subject: Subject) -> None:
    """Also while it is paused, since nothing else could end it; what waits is answered after."""
    subject.run(subject.generator.pull_weights(subject.run(subject.publish())))
    completions = _in_flight(subject, update="drain")
    versions = [set(as_array(one.policy_versions).tolist()) for one in completions]
    newest = subject._version
    assert versions == [{newest - 1}] * 4 + [{newest}] * 2
    subject.require_exact(completions)


def test_prefixes_of_old_weights_are_forgotten(subject: Subject) -> None:
    """The same long prompt before and after a pull."""
    asked = request([9] * 40, seed=1)
    subject.run(subject.all_of([asked]))
    subject.run(subject.generator.pull_weights(subject.run(subject.publish())))
    completions = subject.run(subject.all_of([asked, request([9] * 40, seed=2)]))
    assert {one.policy_version for one in completions} == {subject._version}
    subject.require_exact(completions)


def test_a_pull_that_fails_changes_nothing(subject: Subject) -> None:
    """The newest version is damaged; what runs ends with the weights in use."""

    async def pull_what_is_damaged() -> list[Completion]:
        before = (await subject.generator.get_status()).version
        async with subject.paused_after(3) as reached:
            running = asyncio.create_task(subject.all_of([request(seed=s) for s in range(4)]))
            await reached()
            version = await subject.publish()
            location = subject.store._manifests[version].parts[0].location
            subject.store._pieces[location][0].view(torch.uint8)[0] ^= 1
            with pytest.raises(WeightsError, match="checksum"):
                await subject.generator.pull_weights(version)
            await subject.generator.resume()
            completions = await running
        assert (await subject.generator.get_status()).version == before
        assert {one.policy_version for one in completions} == {before.policy_version}
        return completions

    with subject.using(update="in_flight"):
        subject.require_exact(subject.run(pull_what_is_damaged()))


def test_torn_weights_end_what_runs_and_are_mended_by_the_next_pull(subject: Subject) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("half way")

    async def tear() -> None:
        async with subject.paused_after(3) as reached:
            asked = [request(seed=seed) for seed in range(6)]
            running = [asyncio.create_task(subject.generator.generate_one(one)) for one in asked]
            await reached()
            version = await subject.publish()
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(subject.backend, "use_weights", fail)
                with pytest.raises(TornWeightsError, match="half way"):
                    await subject.generator.pull_weights(version)
            errors = await asyncio.gather(*running, return_exceptions=True)
            assert [type(error) for error in errors] == [WeightsError] * 6
            with pytest.raises(WeightsError, match="half way"):
                await subject.generator.generate_one(request())
            assert await subject.generator.pull_weights(version) == version

    with subject.using(update="in_flight"):
        subject.run(tear())
    subject.require_exact(subject.run(subject.all_of([request(seed=8)])))


def test_an_error_in_a_step_ends_what_runs_and_nothing_else(subject: Subject) -> None:
    async def fail_once() -> list[Any]:
        step = subject.backend.step
        calls = 0

        def fails_at_the_third() -> Any:
            nonlocal calls
            calls += 1
            if calls == 3:
                raise RuntimeError("no memory")
            return step()

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(subject.backend, "step", fails_at_the_third)
            asked = [request(seed=seed, greedy=True) for seed in range(7)]
            running = [asyncio.create_task(subject.generator.generate_one(one)) for one in asked]
            return await asyncio.gather(*running, return_exceptions=True)

    outcomes = subject.run(fail_once())
    assert [type(one) for one in outcomes[:4]] == [EngineError] * 4
    assert "RuntimeError: no memory" in str(outcomes[0])
    subject.require_exact(outcomes[4:])
    subject.require_exact(subject.run(subject.all_of(ragged_requests(5))))


def test_requests_on_their_way_have_different_ids(subject: Subject) -> None:
    async def twice() -> None:
        asked = request()
        first = asyncio.create_task(subject.generator.generate_one(asked))
        await asyncio.sleep(0)
        with pytest.raises(DataError, match="is on its way already"):
            await subject.generator.generate_one(asked)
        await first

    subject.run(twice())


def test_it_tells_what_it_runs_on(subject: Subject) -> None:
    version = subject.run(subject.publish())
    subject.run(subject.generator.pull_weights(version))
    found = subject.run(subject.generator.weight_checksums())
    assert found.version == version
    assert found.tensors.keys() == subject.backend.tensors.keys()
    model = subject._model(version.policy_version)
    for name in ("model.norm.weight", "lm_head.weight"):
        assert torch.equal(
            subject.run(subject.generator.read_weight(name)), model.get_parameter(name)
        )
    with pytest.raises(WeightsError, match="no tensor 'model.nothing'"):
        subject.run(subject.generator.read_weight("model.nothing"))
