"""Guessing and computing, played by scripts that know how and by ones that do not."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from forge_trainer.config import EnvironmentConfig
from forge_trainer.environments import make_episode_runner
from forge_trainer.environments.shipped import calculator, guess
from forge_trainer.environments.shipped.calculator import evaluate
from forge_trainer.environments.shipped.guess import SYMBOLS, Guess
from forge_trainer.types import (
    Completion,
    Episode,
    GenerationRequest,
    Message,
    Prompt,
    SamplingParams,
)
from tests.chat import CHATML, ScriptedModel, chat_directory

Policy = Callable[[str], str]
"""What was said so far, such as "?8<", to the next guess."""


def halving(said: str, largest: int = 15) -> str:
    """The middle of what is left."""
    lowest, highest = 1, largest
    for number, hint in itertools.pairwise(said[1:]):
        if hint == "<":
            highest = SYMBOLS.index(number)
        if hint == ">":
            lowest = SYMBOLS.index(number) + 2
    return SYMBOLS[(lowest + highest) // 2 - 1]


def play(folder: Path, policy: Policy, hidden: str, **options: int) -> Episode:
    """An episode over tokens, as a run makes it."""
    model = ScriptedModel(folder, [])

    async def generate_one(request: GenerationRequest) -> Completion:
        shown = model.tokenizer.decode([int(t) for t in request.token_ids])
        ids = model.ids(policy(shown))
        text = model.tokenizer.decode(ids)
        return Completion(request.token_ids, ids, [-1.0], [0], text, 1.0, "length")

    runner = make_episode_runner(
        EnvironmentConfig(name="guess", options=options),
        None,
        model_dir=folder,
        sampling=SamplingParams(max_completion_tokens=1),
        max_prompt_tokens=16,
        seed=0,
    )
    group = asyncio.run(
        runner.run_group(generate_one, Prompt("?", hidden), group_id=0, group_size=2)
    )
    assert group is not None
    return group[0]


@pytest.mark.parametrize("hidden", SYMBOLS[:15])
def test_halving_finds_every_number_and_all_there_is_to_know(tiny_qwen3: Path, hidden: str) -> None:
    episode = play(tiny_qwen3, halving, hidden)
    assert episode.rewards == pytest.approx({"information": 1.0, "solved": 1.0})
    assert episode.reward == pytest.approx(2.0)
    assert episode.metrics["guesses"] <= 4


def test_the_same_guess_over_and_over_finds_little(tiny_qwen3: Path) -> None:
    """The middle, again and again: 7 of 15 numbers are left."""
    episodes = [play(tiny_qwen3, lambda said: "8", hidden) for hidden in SYMBOLS[:15]]
    left = 1 - math.log2(7) / math.log2(15)
    shares = sorted(episode.rewards["information"] for episode in episodes)
    assert shares == pytest.approx([left] * 14 + [1.0])
    assert sum(episode.rewards["solved"] for episode in episodes) == 1.0


def test_a_conversation_is_one_sequence_whose_targets_are_the_guesses(tiny_qwen3: Path) -> None:
    (transcript,) = play(tiny_qwen3, halving, "6").transcripts
    assert ScriptedModel(tiny_qwen3, []).marked(transcript) == "?«8»<«4»>«6»"


@pytest.mark.parametrize("nonsense", ["?", "g", "\n", "<"])
def test_what_is_no_number_ends_the_episode(tiny_qwen3: Path, nonsense: str) -> None:
    episode = play(tiny_qwen3, lambda said: nonsense, "6")
    assert episode.rewards == {"information": 0.0, "solved": 0.0}
    assert episode.num_turns == 1


def test_hidden_numbers_are_drawn_from_all_of_them() -> None:
    answers = [prompt.answer for prompt in itertools.islice(guess.prompts(0), 600)]
    assert set(answers) == set(SYMBOLS[:15])
    assert answers == [prompt.answer for prompt in itertools.islice(guess.prompts(0), 600)]


def test_without_an_answer_the_seed_hides_a_number() -> None:
    async def hidden(seed: int) -> str:
        environment = Guess()
        await environment.reset(Prompt("?", ""), seed)
        for symbol in SYMBOLS[:15]:
            if (await environment.step(Message("assistant", symbol), "stop")).rewards.get("solved"):
                return symbol
            environment = Guess(guesses=99)
            await environment.reset(Prompt("?", ""), seed)
        raise AssertionError

    drawn = {asyncio.run(hidden(seed)) for seed in range(60)}
    assert len(drawn) > 8
    assert asyncio.run(hidden(3)) == asyncio.run(hidden(3))


CALL = '<tool_call>{"name":"calculator","arguments":{"expression":"17*4 - 30"}}</tool_call>'


def compute(folder: Path, *sayings: str) -> tuple[ScriptedModel, Episode]:
    model = ScriptedModel(folder, [f"{one}<|im_end|>" for one in sayings], "<|im_end|>")
    runner = make_episode_runner(
        EnvironmentConfig(name="calculator"),
        None,
        model_dir=chat_directory(folder, CHATML),
        sampling=SamplingParams(max_completion_tokens=100),
        max_prompt_tokens=1000,
        seed=0,
    )
    prompt = Prompt("17 * 4 - 30 =", "38")
    episode = asyncio.run(runner.run_episode(model.generate_one, prompt, group_id=0, index=0))
    return model, episode


def test_a_tool_is_called_and_its_answer_is_no_target(tmp_path: Path) -> None:
    chat_directory(tmp_path, CHATML)
    model, episode = compute(tmp_path, f"Let me see. {CALL}", "38")
    (transcript,) = episode.transcripts
    assert model.marked(transcript).endswith(
        "<|im_start|>system\nCompute with the calculator, then answer with the number alone."
        "<|im_end|>\n<|im_start|>user\n17 * 4 - 30 =<|im_end|>\n<|im_start|>assistant\n"
        f"«Let me see. {CALL}<|im_end|>»\n"
        "<|im_start|>user\n<tool_response>38</tool_response><|im_end|>\n<|im_start|>assistant\n"
        "«38<|im_end|>»"
    )
    assert '"description": "The value of an arithmetic expression."' in model.marked(transcript)
    assert np.asarray(transcript.sampled).sum() == len(f"Let me see. {CALL}") + 1 + 2 + 1
    assert episode.rewards == {"correct": 1.0}
    assert episode.metrics == {"calls": 1.0, "tool_calls": 1.0}
    assert episode.status == "completed"


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        (CALL.replace("17*4 - 30", "__import__('os')"), "error: only numbers"),
        (CALL.replace("17*4 - 30", "1/0"), "error: float division by zero"),
        (CALL.replace("17*4 - 30", "1 +"), "error: this is no expression"),
        (CALL.replace("17*4 - 30", "9**9**9"), "error: only numbers"),
        (CALL.replace("calculator", "shell"), "error: there is no tool shell"),
        (CALL.replace('"name"', "name"), "error: that is no call in JSON"),
    ],
)
def test_what_is_wrong_with_a_call_is_told_to_the_model(
    tmp_path: Path, call: str, answer: str
) -> None:
    chat_directory(tmp_path, CHATML)
    _, episode = compute(tmp_path, call, "37")
    assert episode.messages[3].content.startswith(answer)
    assert episode.rewards == {"correct": 0.0}


def test_questions_have_the_answers_that_python_gives() -> None:
    for prompt in itertools.islice(calculator.prompts(0), 50):
        question = prompt.text.removesuffix(" =")
        assert prompt.answer == str(eval(question))
        assert evaluate(question) == eval(question)
    assert evaluate("-(2 + 3) * 4 / 8") == -2.5
