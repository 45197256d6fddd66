"""Advantages, schedules, rewards, sequences, replay."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from forge_trainer.errors import ConfigError
from forge_trainer.functional.advantages import group_advantages
from forge_trainer.functional.estimates.flops import device_peak_flops, training_flops
from forge_trainer.functional.rewards import exact_match, resolve_reward, starts_with_answer
from forge_trainer.functional.schedules import warmup_stable_decay
from forge_trainer.functional.sequences import group_sequences
from forge_trainer.types import Completion, Episode, Message, Prompt, TrainSequence, Transcript
from tests.data import same_numbers


def episode(reward: float, *, version: int = 0, group_id: int = 0) -> Episode:
    versions = (version,) * 3
    completion = Completion((1, 2), (3, 4, 5), (-1.0, -2.0, -3.0), versions, "x", 0.7, "stop")
    transcript = Transcript.of_completion(completion)
    messages = (Message("user", "3,7:"), Message("assistant", "x"))
    return Episode(Prompt("3,7:", "7"), (transcript,), reward, group_id, messages=messages)


def test_advantages_are_centred_and_scaled() -> None:
    assert group_advantages([1.0, 0.0, 0.0, 1.0], divide_by_std=False) == [0.5, -0.5, -0.5, 0.5]
    scaled = group_advantages([1.0, 0.0, 0.0, 1.0], divide_by_std=True)
    assert scaled == pytest.approx([1, -1, -1, 1], rel=1e-5)
    # [3, 0, 0]: mean 1, population variance (4 + 1 + 1) / 3 = 2
    assert group_advantages([3.0, 0.0, 0.0], divide_by_std=True)[0] == pytest.approx(
        2 / math.sqrt(2), rel=1e-5
    )


def test_equal_rewards_have_no_advantage() -> None:
    assert group_advantages([0.3, 0.3], divide_by_std=True) == [0.0, 0.0]


def test_an_empty_group_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one reward"):
        group_advantages([], divide_by_std=True)


def test_schedule_of_the_documented_example() -> None:
    factors = [
        warmup_stable_decay(
            step,
            warmup_steps=2,
            decay_steps=2,
            total_steps=6,
            decay_type="linear",
            min_lr_factor=0.0,
        )
        for step in range(8)
    ]
    assert factors == [0.5, 1.0, 1.0, 1.0, 1.0, 0.5, 0.0, 0.0]


def test_rewards_judge_text() -> None:
    prompt = Prompt("3,7:", "7")
    assert [exact_match(text, prompt) for text in ("7", " 7\n", "77", "")] == [1, 1, 0, 0]
    assert [starts_with_answer(t, prompt) for t in ("7", " 7x", "17", "")] == [1, 1, 0, 0]


def test_a_reward_can_be_the_users_own() -> None:
    reward = resolve_reward("tests.unit.test_small_functions:always_two")
    assert reward("anything", Prompt("", "")) == 2.0
    with pytest.raises(ConfigError, match="'nothing' is unknown; use one of"):
        resolve_reward("nothing")
    with pytest.raises(ConfigError, match="cannot be imported"):
        resolve_reward("tests.unit.test_small_functions:missing")


def always_two(completion: str, prompt: Prompt) -> float:
    return 2.0


def test_training_flops_of_the_documented_example() -> None:
    model = {"num_matmul_parameters": 100, "num_layers": 2, "attention_width": 8}
    assert training_flops([10], **model) == 25_200
    assert training_flops([5, 5], **model) == 6 * 100 * 10 + 12 * 2 * 8 * 50
    assert device_peak_flops("NVIDIA H100 80GB HBM3", "bfloat16") == 989e12
    assert device_peak_flops("NVIDIA H100 PCIe", "bfloat16") == 756e12
    assert device_peak_flops("a CPU", "bfloat16") is None


def test_sequences_mark_completion_tokens_as_targets() -> None:
    first, second = group_sequences(
        [episode(1.0), episode(0.0)], divide_by_std=False, per_sequence_mean=True
    )
    third = float(np.float32(1 / 3))
    assert first == TrainSequence(
        token_ids=[1, 2, 3, 4, 5],
        loss_mask=[0, 0, 1, 1, 1],
        advantages=[0.0, 0.0, 0.5, 0.5, 0.5],
        generator_logprobs=[0.0, 0.0, -1.0, -2.0, -3.0],
        token_weights=[0.0, 0.0, third, third, third],
        temperature=0.7,
    )
    assert same_numbers([second.advantages], [[0.0, 0.0, -0.5, -0.5, -0.5]])


def test_a_token_without_a_logprob_is_no_target() -> None:
    """Nor does it count in the mean over a sequence; the packing border would refuse its value."""
    plain = episode(1.0)
    logprobs = (0.0, 0.0, -1.0, -math.inf, math.nan)
    unscored = dataclasses.replace(plain.transcripts[0], logprobs=logprobs)
    sequence, _ = group_sequences(
        [dataclasses.replace(plain, transcripts=(unscored,)), episode(0.0)],
        divide_by_std=False,
        per_sequence_mean=True,
    )
    assert sequence == TrainSequence(
        token_ids=[1, 2, 3, 4, 5],
        loss_mask=[0, 0, 1, 0, 0],
        advantages=[0.0, 0.0, 0.5, 0.0, 0.0],
        generator_logprobs=[0.0, 0.0, -1.0, 0.0, 0.0],
        token_weights=[0.0, 0.0, 1.0, 0.0, 0.0],
        temperature=0.7,
    )
