"""What an evaluation's numbers say, against numbers made by hand or by trying."""

from __future__ import annotations

import itertools
import math

import pytest
from pydantic import ValidationError

from forge_trainer.config import EvalConfig
from forge_trainer.functional.evaluation import mean_interval, pass_at_k
from forge_trainer.run.evaluation import evaluation_metrics
from tests.unit.test_small_functions import episode


def test_right_or_wrong_answers_have_wilsons_interval() -> None:
    """Bounds are the roots of (p - 3/4)^2 = z^2 p (1 - p) / 4, with z = 1.959964."""
    found = mean_interval([[1.0], [0.0], [1.0], [1.0]])
    a = 1 + 1.959964**2 / 4
    b = -(2 * 0.75 + 1.959964**2 / 4)
    roots = [(-b + sign * math.sqrt(b * b - 4 * a * 0.75**2)) / (2 * a) for sign in (-1, 1)]
    assert (found.low, found.high) == pytest.approx(roots, abs=1e-6)
    assert found.mean == 0.75
    never = mean_interval([[0.0]] * 256)
    assert (never.mean, never.low) == (0.0, 0.0)
    assert 0.0 < never.high < 0.02


def test_prompts_are_what_is_independent() -> None:
    """Means 0.5, 1 and 0: standard deviation 0.5, error 0.5 / sqrt(3). Asking each prompt twice as
    often with the same answers says nothing new."""
    values = [[0.5, 0.5], [1.0, 1.0], [0.0, 0.0]]
    found = mean_interval(values)
    half = 1.959964 * 0.5 / math.sqrt(3)
    assert (found.low, found.high) == pytest.approx((0.5 - half, 0.5 + half), abs=1e-6)
    assert mean_interval([group * 2 for group in values]) == found
    assert mean_interval([[0.2, 0.4]]).high == math.inf
    with pytest.raises(ValueError, match="at least one value"):
        mean_interval([[1.0], []])


@pytest.mark.parametrize(
    ("right", "n", "k"), [(2, 4, 2), (0, 4, 2), (3, 4, 2), (1, 5, 3), (5, 5, 1)]
)
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(right: int, n: int, k: int) -> None:
    answers = [True] * right + [False] * (n - right)
    subsets = list(itertools.combinations(answers, k))
    share = sum(any(subset) for subset in subsets) / len(subsets)
    assert pass_at_k([right], n=n, k=k) == pytest.approx(share)
    assert pass_at_k([right, 0], n=n, k=k) == pytest.approx(share / 2)


def test_pass_at_k_needs_k_answers() -> None:
    with pytest.raises(ValueError, match="pass@3 needs at least 3 answers to a prompt, got 2"):
        pass_at_k([1], n=2, k=3)


def test_what_failed_is_counted_in_nothing() -> None:
    config = EvalConfig(every=1, completions=2, greedy=False)
    groups = [[episode(1.0), episode(0.0)], [episode(1.0)]]
    row = evaluation_metrics(groups, config)
    assert row["eval/prompts"] == 2
    assert row["eval/reward"] == 0.75
    # Of the second prompt there is one answer only.
    assert row["eval/pass@1"] == 0.5
    assert evaluation_metrics([], config) == {"eval/prompts": 0.0}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"every": 1, "pass_at": [4]}, "needs as many completions of a prompt, got completions: 1"),
        ({"every": 1, "completions": 2}, "greedy answers to a prompt are all the same"),
    ],
)
def test_an_evaluation_that_says_nothing_is_refused(
    values: dict[str, object], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        EvalConfig.model_validate(values)
