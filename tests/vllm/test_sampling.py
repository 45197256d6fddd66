"""What vLLM samples is what is asked for, and what it says of it is what it sampled from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_trainer.config import VllmConfig
from forge_trainer.errors import ConfigError, DataError
from forge_trainer.types import Completion, GenerationRequest, SamplingParams

from .subject import (
    CONFIG,
    INSTALL,
    LONG,
    SHORT,
    TOLERANCE,
    Subject,
    running_subject,
    started,
    tiny_directory,
    vllm_in_this_process,
)

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    with running_subject(tmp_path_factory.mktemp("models")) as subject:
        yield subject


@pytest.fixture
def subject(running: Subject) -> Subject:
    assert running.backend.num_unfinished == 0
    return running


def test_logprobs_are_those_at_the_temperature(subject: Subject) -> None:
    """By default vLLM gives those before it."""
    for temperature in (0.6, 1.0, 2.0):
        completion = subject.sample(SHORT, temperature=temperature)
        assert subject.gaps(0, completion).max() < TOLERANCE


def test_temperatures_that_vllm_would_change_are_refused(subject: Subject) -> None:
    """It took 0.01 for 0.005, and gave log-probs of that."""
    for temperature in (0.005, 2.5):
        asked = GenerationRequest(SHORT, SamplingParams(4, temperature=temperature))
        with pytest.raises(DataError, match=f"temperature={temperature}: vLLM samples at 0.01 to"):
            subject.backend.check(asked)
    subject.backend.check(GenerationRequest(SHORT, SamplingParams(4, temperature=2.0)))


def test_any_integer_is_a_seed(subject: Subject) -> None:
    """-1 was none, and those of more than 64 bits failed."""
    seeds = [-1, 2**90, 2**90 + 1]
    tokens = [
        [list(subject.sample(SHORT, seed=seed).token_ids) for _ in range(2)] for seed in seeds
    ]
    assert all(first == second for first, second in tokens)
    assert len({tuple(first) for first, _ in tokens}) == 3


def _is_likeliest(subject: Subject, completion: Completion) -> bool:
    ids = torch.tensor([*completion.prompt_token_ids, *completion.token_ids]).long()
    with torch.no_grad():
        best = subject.models[0](ids[None]).logits[0].argmax(-1)
    return bool(
        (best[len(completion.prompt_token_ids) - 1 : -1] == ids[-len(completion.token_ids) :]).all()
    )


def test_greedy_tokens_have_logprobs_at_the_temperature(subject: Subject) -> None:
    """vLLM gives those at 1. Rows of the batch move when their neighbours end."""
    for i in range(12):
        greedy = i % 3 == 0
        subject.add(
            [40 + i, 41],
            name=f"{'greedy' if greedy else 'sampled'}{i}",
            greedy=greedy,
            temperature=0.5 + i / 8,
            max_completion_tokens=40 - 3 * i,
        )
    done = subject.finish()
    for name, completion in done.items():
        assert subject.gaps(0, completion).max() < TOLERANCE
        assert _is_likeliest(subject, completion) == name.startswith("greedy")
    alone = subject.sample(SHORT, greedy=True, temperature=0.5)
    assert subject.gaps(0, alone).max() < TOLERANCE
    assert _is_likeliest(subject, alone)


def test_a_stop_string_ends_the_text_and_its_tokens_stay(subject: Subject) -> None:
    whole = subject.sample(SHORT, seed=5)
    # A character of one token that is not in what comes before it.
    at = next(
        i
        for i, character in enumerate(whole.text)
        if i > 8 and character.isascii() and character not in whole.text[:i]
    )
    stopped = subject.sample(SHORT, seed=5, stop=(whole.text[at],))
    assert stopped.text == whole.text[:at]
    assert stopped.stop_reason == "stop"
    number = len(stopped.token_ids)
    assert list(stopped.token_ids) == list(whole.token_ids[:number])
    assert [int(stopped.token_ids[-1])] == subject.backend.encode(whole.text[at])
    assert len(stopped.logprobs) == len(stopped.policy_versions) == number
    assert subject.gaps(0, stopped).max() < TOLERANCE


def test_prompts_share_whole_blocks_of_128_tokens(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[str, int] = {}
    step = subject.backend._engine.step

    def watched() -> Any:
        outputs = step()
        found.update({output.request_id: output.num_cached_tokens for output in outputs})
        return outputs

    monkeypatch.setattr(subject.backend._engine, "step", watched)
    subject.use(0)
    completions = {}
    for name, prompt in {
        "first": LONG,
        "same": LONG,
        "short": LONG[:127],
        "alike": LONG[:130],
    }.items():
        subject.add(prompt, name=name)
        completions.update(subject.finish())
    assert found == {"first": 0, "same": 128, "short": 0, "alike": 128}
    for completion in completions.values():
        assert subject.gaps(0, completion).max() < TOLERANCE


def test_a_failing_step_ends_its_requests_and_leaves_nothing_behind(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They never ended, and blocks that were not computed served the same prompt later."""
    executor = subject.backend._engine.model_executor

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("out of memory")

    subject.use(1)
    subject.sample(LONG[::-1])
    subject.use(0)
    for name in "abc":
        subject.add(LONG, name=name)
    with monkeypatch.context() as patched:
        patched.setattr(executor, "execute_model", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            subject.backend.step()
    assert subject.backend.num_unfinished == 0
    assert not subject.backend._engine.has_unfinished_requests()
    assert subject.gaps(0, subject.sample(LONG)).max() < TOLERANCE


def test_a_cache_without_room_for_a_completion_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason=INSTALL)
    model_dir = tiny_directory(tmp_path, seed=0, tied=True)
    too_small = CONFIG.model_copy(update={"vllm": VllmConfig(kv_cache_gb=0.0003)})
    with (
        vllm_in_this_process(),
        pytest.raises(ConfigError, match="room for 128 tokens, .* are 240; raise kv_cache_gb"),
    ):
        started(too_small, model_dir)
