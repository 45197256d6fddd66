"""Drawing tokens, against slow obvious versions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from forge_trainer.generation import sampling
from forge_trainer.generation.sampling import Draws, draw_tokens, uniforms


def _draws(rows: list[int], numbers: list[float], *, greedy: bool = False) -> Draws:
    return Draws(
        torch.tensor(rows),
        torch.tensor(numbers, dtype=torch.float64),
        torch.full((len(rows),), greedy),
    )


def test_the_first_token_above_the_random_number_is_drawn() -> None:
    """Probabilities 1/4 and 3/4, twice from one row."""
    logits = torch.tensor([[0.0, math.log(3.0)]])
    tokens, logprobs = draw_tokens(logits, torch.ones(1), _draws([0, 0, 0], [0.2, 0.25, 0.999]))
    assert tokens.tolist() == [0, 1, 1]
    wanted = [math.log(0.25), math.log(0.75), math.log(0.75)]
    assert logprobs.tolist() == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("R", "V"), [(1, 1), (3, 7), (4, 256), (4, 257), (5, 1000), (2, 70_001), (1, 151_936)]
)
def test_drawing_is_inverse_transform_sampling(R: int, V: int, dtype: torch.dtype) -> None:
    """With each row's own temperature, against float64 sums over the whole vocabulary."""
    random = torch.Generator().manual_seed(R * V)
    logits_RV = (3 * torch.randn(R, V, generator=random)).to(dtype)
    temperatures_R = 0.3 + torch.rand(R, generator=random)
    S = 200
    rows_S = torch.randint(0, R, (S,), generator=random)
    numbers_S = torch.rand(S, generator=random, dtype=torch.float64)
    greedy_S = torch.arange(S) % 7 == 0
    tokens_S, logprobs_S = draw_tokens(
        logits_RV, temperatures_R, Draws(rows_S, numbers_S, greedy_S)
    )
    wanted_RV = torch.log_softmax(logits_RV.double() / temperatures_R.double()[:, None], dim=-1)
    upto_SV = wanted_RV.exp().cumsum(-1)[rows_S]
    sampled_S = (upto_SV <= numbers_S[:, None] * upto_SV[:, -1:]).sum(-1)
    likeliest_S = logits_RV.argmax(-1)[rows_S]
    assert torch.equal(tokens_S, torch.where(greedy_S, likeliest_S, sampled_S))
    torch.testing.assert_close(
        logprobs_S.double(), wanted_RV[rows_S, tokens_S], atol=2e-6, rtol=0.0
    )


def test_tiles_of_any_size_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    random = torch.Generator().manual_seed(0)
    logits_RV = torch.randn(6, 3000, generator=random)
    draws = _draws(list(range(6)), torch.rand(6, generator=random).tolist())
    whole = draw_tokens(logits_RV, torch.ones(6), draws)
    for smallest in (256, 1000, 7000):
        monkeypatch.setattr(sampling, "SMALLEST_TILE", smallest)
        monkeypatch.setattr(sampling, "TILES", 10**9)
        tokens, logprobs = draw_tokens(logits_RV, torch.ones(6), draws)
        assert torch.equal(tokens, whole[0])
        torch.testing.assert_close(logprobs, whole[1], atol=1e-6, rtol=0.0)


@pytest.mark.parametrize("number", [0.0, 0.5, 1.0 - 2**-53])
def test_a_token_of_probability_zero_is_never_drawn(number: float) -> None:
    """Also at both ends, where sums are equal or rounded."""
    logits = torch.full((1, 1000), -torch.inf)
    logits[0, [300, 301, 900]] = torch.tensor([0.0, -3.0, 1.0])
    tokens, logprobs = draw_tokens(logits, torch.ones(1), _draws([0], [number]))
    assert tokens.item() in (300, 301, 900)
    assert logprobs.isfinite().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_show_in_the_logprob(bad: float) -> None:
    logits = torch.zeros(2, 600)
    logits[0, 5] = bad
    _, logprobs = draw_tokens(logits, torch.ones(2), _draws([0, 1], [0.5, 0.5]))
    assert logprobs.isfinite().tolist() == [False, True]


def test_logits_stay_as_they_are() -> None:
    logits = torch.randn(3, 500)
    before = logits.clone()
    draw_tokens(logits, torch.full((3,), 0.7), _draws([0, 1, 2], [0.1, 0.5, 0.9]))
    assert torch.equal(logits, before)


def _uniforms(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    return uniforms(np.array(seeds, np.uint64), np.array(positions, np.int64))


def _splitmix(seed: int, position: int) -> float:
    """With Python's whole numbers."""

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        return z ^ (z >> 31)

    state = mix(seed) + (position + 1) * 0x9E3779B97F4A7C15
    return (mix(state % 2**64) >> 11) / 2**53


def test_random_numbers_follow_from_seed_and_position_alone() -> None:
    seeds, positions = [0, 1, 2**63, 2**64 - 5, 7], [0, 0, 3, 4, 100_000]
    wanted = [_splitmix(seed, at) for seed, at in zip(seeds, positions, strict=True)]
    assert _uniforms(seeds, positions).tolist() == wanted
    # The first output of SplitMix64 from state 0, which 0 is mixed to.
    assert wanted[0] == (0xE220A8397B1DCDAF >> 11) / 2**53


def test_random_numbers_are_even_along_seeds_and_positions() -> None:
    n = 40_000
    for numbers in (_uniforms([5] * n, range(n)), _uniforms(range(n), [0] * n)):
        counts = np.bincount((numbers * 100).astype(int), minlength=100)
        chi_square = float(((counts - n / 100) ** 2 / (n / 100)).sum())
        # 99 degrees of freedom: mean 99, standard deviation 14.
        assert 50 < chi_square < 160
        assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 0.02


def test_many_draws_have_the_models_distribution() -> None:
    logits = torch.tensor([[1.0, 0.0, -1.0, 2.0, -torch.inf]])
    n = 20_000
    numbers = _uniforms(range(n), [3] * n).tolist()
    tokens, _ = draw_tokens(logits, torch.full((1,), 0.8), _draws([0] * n, numbers))
    counts = Counter(tokens.tolist())
    for token, probability in enumerate(torch.softmax(logits[0] / 0.8, dim=0).tolist()):
        deviation = math.sqrt(n * probability * (1 - probability))
        assert abs(counts[token] - n * probability) <= 5 * deviation
