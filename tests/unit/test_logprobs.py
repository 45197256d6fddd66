"""Log-probs against materialised logits, by hand and in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from forge_trainer.functional.logprobs import LogprobOptions, selected_logprobs, token_logprobs


def _reference(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperatures: Tensor
) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax(hidden @ weight.T / temperatures[:, None], dim=-1)
    return log_p.gather(-1, targets[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def _random_inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(13, 8, dtype=dtype, requires_grad=True)
    weight = torch.randn(29, 8, dtype=dtype, requires_grad=True)
    temperatures = torch.rand(13).to(dtype) + 0.5
    return hidden, weight, torch.randint(29, (13,)), temperatures


def test_logprob_of_a_hand_made_example() -> None:
    hidden, weight = torch.tensor([[1.0, 0.0]]), torch.eye(2)
    logprobs, entropy = selected_logprobs(
        hidden, weight, torch.tensor([0]), torch.ones(1), LogprobOptions(with_entropy=True)
    )
    p = math.e / (math.e + 1)
    assert logprobs.item() == pytest.approx(1 - math.log(math.e + 1))
    assert entropy is not None
    assert entropy.item() == pytest.approx(-(p * math.log(p) + (1 - p) * math.log(1 - p)))


@pytest.mark.parametrize("chunk_tokens", [1, 4, 13, 100])
def test_chunking_changes_neither_values_nor_gradients(chunk_tokens: int) -> None:
    hidden, weight, targets, temperatures = _random_inputs(torch.float64)
    upstream_logprobs, upstream_entropy = torch.randn(2, 13, dtype=torch.float64)
    wanted = _reference(hidden, weight, targets, temperatures)
    wanted_grads = torch.autograd.grad(
        (wanted[0] * upstream_logprobs + wanted[1] * upstream_entropy).sum(), (hidden, weight)
    )
    logprobs, entropy = selected_logprobs(
        hidden, weight, targets, temperatures, LogprobOptions(chunk_tokens, with_entropy=True)
    )
    assert entropy is not None
    grads = torch.autograd.grad(
        (logprobs * upstream_logprobs + entropy * upstream_entropy).sum(), (hidden, weight)
    )
    torch.testing.assert_close((logprobs, entropy), wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grads, wanted_grads, rtol=1e-10, atol=1e-12)


def test_bfloat16_inputs_are_reduced_in_float32() -> None:
    hidden, weight, targets, temperatures = _random_inputs(torch.bfloat16)
    logprobs, _ = selected_logprobs(hidden, weight, targets, temperatures)
    logprobs.sum().backward()
    assert logprobs.dtype == torch.float32
    assert weight.grad is not None
    assert weight.grad.dtype == torch.bfloat16


def test_bfloat16_logits_are_not_rounded() -> None:
    """Of logits between 16 and 32, bfloat16 keeps steps of 1/8: the ratio was up to 6% off."""
    require_unrounded_logits("cpu")


def require_unrounded_logits(device: str) -> None:
    """Log-probs and entropies are those of float64 on the same bfloat16 inputs, to 1e-3."""
    torch.manual_seed(0)
    N, H, V = 64, 128, 300
    hidden = torch.randn(N, H).bfloat16().to(device)
    weight = torch.randn(V, H).bfloat16().to(device)
    targets = torch.randint(V, (N,), device=device)
    temperatures = torch.full((N,), 0.7, device=device)
    options = LogprobOptions(chunk_tokens=10, with_entropy=True)
    found, entropies = selected_logprobs(hidden, weight, targets, temperatures, options)
    log_p = torch.log_softmax(hidden.double() @ weight.double().T / 0.7, dim=-1)
    assert log_p.abs().max() > 16
    wanted = log_p.gather(-1, targets[:, None]).squeeze(-1)
    assert (found - wanted).abs().max() < 1e-3
    assert entropies is not None
    assert (entropies + (log_p.exp() * log_p).sum(-1)).abs().max() < 1e-3


def test_token_logprobs_sit_at_the_token_they_speak_about() -> None:
    """Two documents and padding in one row: [a b c | d e | -]."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(1, 6, 4), torch.randn(7, 4)
    tokens = torch.tensor([[1, 2, 3, 4, 5, 0]])
    documents = torch.tensor([[0, 0, 0, 1, 1, -1]])
    logprobs, _ = token_logprobs(hidden, weight, tokens, documents, torch.ones(1, 6))
    log_p = torch.log_softmax(hidden[0] @ weight.T, dim=-1)
    wanted = [0.0, log_p[0, 2], log_p[1, 3], 0.0, log_p[3, 5], 0.0]
    torch.testing.assert_close(logprobs[0], torch.tensor(wanted))


@pytest.mark.parametrize("wanted", ["some", "none", "all"])
def test_what_is_not_wanted_is_zero_and_changes_nothing_else(wanted: str) -> None:
    """Values and gradients are those of all tokens, where the others count for nothing."""
    torch.manual_seed(0)
    tokens = torch.randint(7, (2, 6))
    documents = torch.tensor([[0, 0, 0, 1, 1, -1], [2, 2, 2, 2, 3, 3]])
    some = torch.rand(2, 6) < 0.5
    wanted_BT = {"some": some, "none": some & False, "all": some | True}[wanted]
    upstream = torch.randn(2, 2, 6, dtype=torch.float64)
    found = []
    for given_BT in (None, wanted_BT):
        torch.manual_seed(1)
        hidden = torch.randn(2, 6, 4, dtype=torch.float64, requires_grad=True)
        weight = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
        logprobs, entropies = token_logprobs(
            hidden,
            weight,
            tokens,
            documents,
            torch.full((2, 6), 0.7, dtype=torch.float64),
            LogprobOptions(chunk_tokens=3, with_entropy=True),
            wanted_BT=given_BT,
        )
        assert entropies is not None
        values = torch.stack([logprobs, entropies]) * wanted_BT
        if given_BT is not None:
            assert torch.equal(torch.stack([logprobs, entropies]), values)
        (values * upstream).sum().backward()
        found.append((values, hidden.grad, weight.grad))
    for of_all, of_wanted in zip(*found, strict=True):
        torch.testing.assert_close(of_wanted, of_all)


def test_a_single_column_has_no_prediction() -> None:
    logprobs, _ = token_logprobs(
        torch.randn(2, 1, 4),
        torch.randn(7, 4),
        torch.zeros(2, 1, dtype=torch.int64),
        torch.zeros(2, 1, dtype=torch.int64),
        torch.ones(2, 1),
    )
    assert logprobs.tolist() == [[0.0], [0.0]]
