"""New weights under vLLM: nothing of the old ones is left anywhere, and nothing is half done."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from torch import Tensor

from forge_trainer.types import Completion
from forge_trainer.types.arrays import as_array

from .subject import LONG, SHORT, TOLERANCE, Subject, running_subject

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module", params=["tied", "untied"])
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Subject]:
    folder = tmp_path_factory.mktemp(request.param)
    with running_subject(folder, tied=request.param == "tied") as subject:
        yield subject


@pytest.fixture
def subject(running: Subject) -> Subject:
    """On the first weights, with nothing to do."""
    assert running.backend.num_unfinished == 0
    running.use(0)
    return running


def test_all_of_new_weights_is_used(subject: Subject) -> None:
    """A tied output layer computed with a packed copy of the old embedding, without a word."""
    for model in (1, 0):
        version = subject.use(model)
        completion = subject.sample(SHORT)
        assert subject.gaps(model, completion).max() < TOLERANCE
        assert subject.gaps(1 - model, completion).max() > 0.05, "the versions are alike"
        assert set(completion.policy_versions) == {version}


def test_what_is_pulled_is_not_used_before_it_is_taken_over(subject: Subject) -> None:
    subject.stage(1)
    assert subject.gaps(0, subject.sample(SHORT)).max() < TOLERANCE


def test_prefixes_of_old_weights_are_forgotten(subject: Subject) -> None:
    """A block of the prompt's keys and values came from the old weights."""
    subject.sample(LONG)
    subject.use(1)
    assert subject.gaps(1, subject.sample(LONG)).max() < TOLERANCE


def _in_flight(subject: Subject, *, keep_cache: bool) -> tuple[list[Completion], Completion, int]:
    """Four requests that an update meets, one that comes after it, and its version."""
    for seed in range(4):
        subject.add(LONG, name=str(seed), seed=seed)
    for _ in range(9):
        assert subject.backend.step() == []
    version = subject.use(1, keep_cache=keep_cache)
    subject.add(LONG, name="late")
    done = subject.finish()
    late = done.pop("late")
    return list(done.values()), late, version


def test_requests_that_run_go_on_with_new_weights(subject: Subject) -> None:
    """The keys and values of their first tokens were those of the old weights."""
    completions, late, version = _in_flight(subject, keep_cache=False)
    for completion in completions:
        new = as_array(completion.policy_versions) == version
        assert new.tolist() == [False] * 9 + [True] * 15
        assert subject.gaps(0, completion)[~new].max() < TOLERANCE
        assert subject.gaps(1, completion)[new].max() < TOLERANCE
    assert subject.gaps(1, late).max() < TOLERANCE


def test_kept_caches_serve_those_that_run_and_nobody_else(subject: Subject) -> None:
    completions, late, version = _in_flight(subject, keep_cache=True)
    for completion in completions:
        new = as_array(completion.policy_versions) == version
        assert new.tolist() == [False] * 9 + [True] * 15
        assert subject.gaps(0, completion)[~new].max() < TOLERANCE
        assert subject.gaps(1, completion)[new].max() > 1e-3, "an approximation that is exact"
    assert subject.gaps(1, late).max() < TOLERANCE


def test_a_load_that_fails_half_way_is_mended_by_a_whole_one(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers stayed on the meta device, so that no step ran; and one that had a part of its weights
    took the rest for superfluous the next time."""
    worker = subject.backend._engine.model_executor.driver_worker
    model: Any = worker.get_model()
    load = model.load_weights

    def half(weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        before = itertools.takewhile(lambda pair: ".k_proj." not in pair[0], weights)
        load(list(before))
        raise OSError("no more")

    subject.add(SHORT)
    subject.backend.step()
    with monkeypatch.context() as patched:
        patched.setattr(model, "load_weights", half)
        with pytest.raises(OSError, match="no more"):
            subject.use(1)
    subject.backend.cancel("a")
    subject.use(1)
    assert subject.gaps(1, subject.sample(SHORT)).max() < TOLERANCE


def test_weights_that_vllm_does_not_take_are_missed(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It left a layer as it was, and logged a line."""
    model: Any = subject.backend._engine.model_executor.driver_worker.get_model()
    load = model.load_weights

    def without_norm(weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        found: set[str] = load([(name, t) for name, t in weights if name != "model.norm.weight"])
        return found

    with monkeypatch.context() as patched:
        patched.setattr(model, "load_weights", without_norm)
        with pytest.raises(RuntimeError, match=r"no weights for \['model.norm.weight'\]"):
            subject.use(1)
    subject.use(0)
