"""Losses against numbers made by hand."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from forge_trainer.errors import ConfigError
from forge_trainer.functional.losses.fields import required_fields
from forge_trainer.functional.losses.kl import KL_ESTIMATORS
from forge_trainer.functional.losses.mismatch import mismatch
from forge_trainer.functional.losses.objective import (
    LOSSES,
    make_loss,
    needs_entropy,
)
from forge_trainer.types import LossOutput, TrainBatch


def _batch(**fields: list[float]) -> TrainBatch:
    """One row: a document of four tokens, the last three of them targets."""
    given: dict[str, Any] = {f"{name}_BT": torch.tensor([v]) for name, v in fields.items()}
    return TrainBatch(
        token_ids_BT=torch.tensor([[5, 6, 7, 8]]),
        positions_BT=torch.arange(4)[None],
        document_ids_BT=torch.zeros(1, 4, dtype=torch.int64),
        loss_mask_BT=torch.tensor([[False, True, True, True]]),
        temperatures_BT=torch.ones(1, 4),
        **given,
    )


def _logprobs(*values: float) -> Tensor:
    return torch.tensor([values], requires_grad=True)


def _total_and_grad(output: LossOutput, logprobs: Tensor) -> tuple[float, list[float]]:
    (grad,) = torch.autograd.grad(output.total, logprobs)
    return output.total.item(), grad[0].tolist()


def test_cross_entropy_is_the_negated_sum_over_targets() -> None:
    logprobs = _logprobs(9.0, -1.0, -2.0, -3.0)
    total, grad = _total_and_grad(make_loss("cross_entropy")(logprobs, _batch()), logprobs)
    assert total == pytest.approx(6.0)
    assert grad == [0.0, -1.0, -1.0, -1.0]


def test_token_weights_scale_each_token() -> None:
    logprobs = _logprobs(9.0, -1.0, -2.0, -3.0)
    batch = _batch(token_weights=[7.0, 0.5, 0.0, 2.0])
    total, grad = _total_and_grad(make_loss("cross_entropy")(logprobs, batch), logprobs)
    assert total == pytest.approx(0.5 * 1 + 2 * 3)
    assert grad == [0.0, -0.5, 0.0, -2.0]


def test_reinforce_weighs_logprobs_by_advantage() -> None:
    logprobs = _logprobs(9.0, -1.0, -2.0, -3.0)
    batch = _batch(advantages=[5.0, 2.0, -1.0, 0.5])
    total, grad = _total_and_grad(make_loss("reinforce")(logprobs, batch), logprobs)
    assert total == pytest.approx(-(2 * -1 + -1 * -2 + 0.5 * -3))
    assert grad == [0.0, -2.0, 1.0, -0.5]


def test_grpo_clips_the_ratio_from_the_side_that_would_gain() -> None:
    """Ratios 1.5, 1.5 and 0.5 with advantages 1, -1 and -1; bounds 0.8 and 1.2.

    The first gains beyond the bound: clipped, no gradient. The second loses: not clipped. The
    third gains below the bound: clipped at 0.8.
    """
    logprobs = _logprobs(0.0, math.log(1.5) - 1, math.log(1.5) - 1, math.log(0.5) - 1)
    batch = _batch(advantages=[0.0, 1.0, -1.0, -1.0], generator_logprobs=[0.0, -1.0, -1.0, -1.0])
    output = make_loss("grpo")(logprobs, batch)
    total, grad = _total_and_grad(output, logprobs)
    assert total == pytest.approx(-(1.2 - 1.5 - 0.8), rel=1e-6)
    assert grad == pytest.approx([0.0, 0.0, 1.5, 0.0], rel=1e-6)
    assert output.metrics["loss/clip_fraction"].value == pytest.approx(2 / 3)
    assert output.metrics["loss/ratio"].value == pytest.approx((1.5 + 1.5 + 0.5) / 3)
    gap = (2 * math.log(1.5) + math.log(2)) / 3
    assert mismatch(logprobs, batch)["rollout/logprob_gap"].value == pytest.approx(gap)


def test_grpo_adds_k3_to_a_reference() -> None:
    """One token each with p_ref / p = 2, 1 and 1/2: k3 = x - ln x - 1."""
    logprobs = _logprobs(0.0, -1.0, -1.0, -1.0)
    batch = _batch(
        advantages=[0.0] * 4,
        generator_logprobs=[0.0, -1.0, -1.0, -1.0],
        ref_logprobs=[0.0, -1 + math.log(2), -1.0, -1 - math.log(2)],
    )
    output = make_loss("grpo", {"kl_coef": 0.1})(logprobs, batch)
    k3 = (2 - math.log(2) - 1) + 0.0 + (0.5 + math.log(2) - 1)
    total, grad = _total_and_grad(output, logprobs)
    assert total == pytest.approx(0.1 * k3, rel=1e-5)
    assert grad == pytest.approx([0.0, 0.1 * (1 - 2), 0.0, 0.1 * (1 - 0.5)], abs=1e-7)


def test_dapo_has_a_higher_upper_bound() -> None:
    logprobs = _logprobs(0.0, math.log(1.25), math.log(1.5), math.log(0.5))
    batch = _batch(advantages=[0.0, 1.0, 1.0, -1.0], generator_logprobs=[0.0] * 4)
    total, grad = _total_and_grad(make_loss("dapo")(logprobs, batch), logprobs)
    assert total == pytest.approx(-(1.25 + 1.28 - 0.8), rel=1e-6)
    assert grad == pytest.approx([0.0, -1.25, 0.0, 0.0], rel=1e-6)


def test_importance_sampling_weighs_the_gradient_by_the_ratio() -> None:
    """Ratios 1.5, 1 and 0.5 with advantages 1, 2 and -1: total -(1.5 + 2 - 0.5)."""
    logprobs = _logprobs(0.0, math.log(1.5) - 1, -1.0, math.log(0.5) - 1)
    batch = _batch(advantages=[0.0, 1.0, 2.0, -1.0], generator_logprobs=[0.0, -1.0, -1.0, -1.0])
    total, grad = _total_and_grad(make_loss("importance_sampling")(logprobs, batch), logprobs)
    assert total == pytest.approx(-3.0, rel=1e-6)
    assert grad == pytest.approx([0.0, -1.5, -2.0, 0.5], rel=1e-6)


def test_ppo_takes_its_bounds_as_ratios() -> None:
    """Ratios 1.5, 1.5 and 0.5 with advantages 1, -1 and -1; bounds 0.6 and 1.4."""
    logprobs = _logprobs(0.0, math.log(1.5) - 1, math.log(1.5) - 1, math.log(0.5) - 1)
    batch = _batch(advantages=[0.0, 1.0, -1.0, -1.0], generator_logprobs=[0.0, -1.0, -1.0, -1.0])
    loss = make_loss("ppo", {"ratio_low": 0.6, "ratio_high": 1.4})
    total, grad = _total_and_grad(loss(logprobs, batch), logprobs)
    assert total == pytest.approx(-(1.4 - 1.5 - 0.6), rel=1e-6)
    assert grad == pytest.approx([0.0, 0.0, 1.5, 0.0], rel=1e-6)


def test_cispo_clips_the_weight_and_keeps_the_gradient() -> None:
    """Ratios 1.5, 1 and 0.1 with advantages 1, 2 and -1; weights 1.2, 1 and 0.1."""
    values = (0.0, math.log(1.5) - 1, -1.0, math.log(0.1) - 1)
    logprobs = _logprobs(*values)
    batch = _batch(advantages=[0.0, 1.0, 2.0, -1.0], generator_logprobs=[0.0, -1.0, -1.0, -1.0])
    total, grad = _total_and_grad(make_loss("cispo")(logprobs, batch), logprobs)
    assert total == pytest.approx(-(1.2 * values[1] + 2 * values[2] - 0.1 * values[3]), rel=1e-6)
    assert grad == pytest.approx([0.0, -1.2, -2.0, 0.1], rel=1e-6)


def test_gspo_clips_the_ratio_of_the_whole_sequence() -> None:
    """Two documents: log-ratios [0.3 -0.1] (mean 0.1, s = e^0.1) and [0.2] (s = e^0.2, clipped).

    Within the bounds each of a document's n tokens has the gradient -A s (n tokens share s, and
    s changes by s/n with each): -2 e^0.1 * (1/2) * 2 = -e^0.1 with A = 1 for both.
    """
    logprobs = _logprobs(0.0, -0.7, -1.1, -0.8)
    batch = dataclasses.replace(
        _batch(advantages=[0.0, 1.0, 1.0, 1.0], generator_logprobs=[0.0, -1.0, -1.0, -1.0]),
        document_ids_BT=torch.tensor([[4, 4, 4, 7]]),
    )
    loss = make_loss("gspo", {"ratio_low": 0.9, "ratio_high": 1.15})
    total, grad = _total_and_grad(loss(logprobs, batch), logprobs)
    assert total == pytest.approx(-(2 * math.exp(0.1) + 1.15), rel=1e-6)
    assert grad == pytest.approx([0.0, -math.exp(0.1), -math.exp(0.1), 0.0], rel=1e-6)


def test_dro_pulls_towards_the_generator() -> None:
    """Log-ratios 0.4, 0 and -0.2 with advantages 1, 2 and 0, beta 0.5."""
    logprobs = _logprobs(0.0, -0.6, -1.0, -1.2)
    batch = _batch(advantages=[0.0, 1.0, 2.0, 0.0], generator_logprobs=[0.0, -1.0, -1.0, -1.0])
    total, grad = _total_and_grad(make_loss("dro", {"beta": 0.5})(logprobs, batch), logprobs)
    assert total == pytest.approx(0.6 + 0.25 * 0.16 + 2.0 + 0.25 * 0.04, rel=1e-5)
    assert grad == pytest.approx([0.0, -1 + 0.5 * 0.4, -2.0, 0.5 * -0.2], abs=1e-6)


@pytest.mark.parametrize(
    ("estimator", "value", "slope", "slope_where_equal"),
    [
        ("k1", math.log(2), 1.0, 1.0),
        ("k2", math.log(2) ** 2 / 2, math.log(2), 0.0),
        ("k3", 0.5 + math.log(2) - 1, 0.5, 0.0),
    ],
)
def test_kl_estimators_by_hand(
    estimator: str, value: float, slope: float, slope_where_equal: float
) -> None:
    """One token with p_ref = p / 2, two with p_ref = p; slopes are derivatives by log p."""
    logprobs = _logprobs(0.0, -1.0, -1.0, -1.0)
    ref = [0.0, -1 - math.log(2), -1.0, -1.0]
    loss = make_loss("cross_entropy", {"kl_coef": 2.0, "kl_estimator": estimator})
    total, grad = _total_and_grad(loss(logprobs, _batch(ref_logprobs=ref)), logprobs)
    assert total == pytest.approx(3.0 + 2.0 * value, rel=1e-6)
    equal = -1.0 + 2.0 * slope_where_equal
    assert grad == pytest.approx([0.0, -1.0 + 2.0 * slope, equal, equal], rel=1e-5)


def test_k1_and_k3_are_unbiased() -> None:
    """Over all tokens of a small distribution, the means are the KL itself."""
    p, ref = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    exact = float((p * (p / ref).log()).sum())
    d = (ref / p).log()
    for name in ("k1", "k3"):
        assert float((p * KL_ESTIMATORS[name](d)).sum()) == pytest.approx(exact, rel=1e-6)


def test_the_entropy_term_is_a_weighted_bonus() -> None:
    logprobs = _logprobs(0.0, -1.0, -1.0, -1.0)
    entropies = torch.tensor([[9.0, 1.0, 2.0, 3.0]], requires_grad=True)
    batch = dataclasses.replace(
        _batch(advantages=[0.0] * 4, token_weights=[0.0, 1.0, 0.5, 0.0]), entropies_BT=entropies
    )
    loss = make_loss("reinforce", {"entropy_coef": 0.1})
    assert needs_entropy(loss)
    assert not needs_entropy(make_loss("reinforce"))
    output = loss(logprobs, batch)
    (grad,) = torch.autograd.grad(output.total, entropies)
    assert output.total.item() == pytest.approx(-0.1 * (1.0 + 1.0))
    assert grad[0].tolist() == pytest.approx([0.0, -0.1, -0.05, 0.0])
    assert output.metrics["loss/entropy"].value == pytest.approx(2.0)


def test_what_lies_outside_the_mask_cannot_overflow() -> None:
    """A bug met early: exp of a log-ratio at a prompt token was inf, and inf * 0 is nan."""
    logprobs = _logprobs(500.0, -1.0, -1.0, -1.0)
    batch = _batch(advantages=[1.0] * 4, generator_logprobs=[-500.0, -1.0, -1.0, -1.0])
    total, grad = _total_and_grad(make_loss("grpo")(logprobs, batch), logprobs)
    assert math.isfinite(total)
    assert all(math.isfinite(g) for g in grad)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_every_loss_is_a_sum_over_tokens(name: str) -> None:
    """Two copies of a batch give twice the total, so ranks and microbatches can be added up."""
    fields = {"advantages": [0.0, 1.0, -1.0, 0.5], "generator_logprobs": [0.0, -1.1, -0.9, -1.0]}
    values = (0.0, -1.0, -1.2, -0.7)
    one = make_loss(name)(_logprobs(*values), _batch(**fields))
    both = _batch(**fields).select_rows(torch.tensor([0, 0]))
    two = make_loss(name)(torch.tensor([values, values], requires_grad=True), both)
    assert two.total.item() == pytest.approx(2 * one.total.item(), rel=1e-6)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_every_loss_looks_at_targets_alone(name: str) -> None:
    """The engine computes no log-prob of other tokens for a registered loss, and leaves 0."""
    fields = {
        "advantages": [0.7, 1.0, -1.0, 0.5],
        "generator_logprobs": [-0.3, -1.1, -0.9, -1.0],
        "ref_logprobs": [-0.2, -1.0, -1.0, -1.0],
        "token_weights": [0.5, 1.0, 0.5, 2.0],
    }
    batch = dataclasses.replace(
        _batch(**fields), loss_mask_BT=torch.tensor([[False, True, False, True]])
    )
    loss = make_loss(name, {"kl_coef": 0.1})
    found = []
    for elsewhere in (-0.6, 0.0):
        logprobs = _logprobs(elsewhere, -1.0, elsewhere, -0.7)
        output = loss(logprobs, batch)
        metrics = {key: float(metric.value) for key, metric in output.metrics.items()}
        found.append((_total_and_grad(output, logprobs), metrics))
    assert found[0] == found[1]


def test_unknown_losses_and_options_are_config_errors() -> None:
    with pytest.raises(ConfigError, match="'gpo' is not registered; use one of"):
        make_loss("gpo")
    with pytest.raises(ConfigError, match="no option \\['clip'\\]; it takes \\['ratio_low'"):
        make_loss("grpo", {"clip": 0.1})


def test_a_reference_is_required_only_with_a_kl_term() -> None:
    assert "ref_logprobs" not in required_fields("grpo")
    assert "ref_logprobs" in required_fields("grpo", {"kl_coef": 0.1})


def test_the_kl_term_takes_nothing_from_tokens_outside_the_mask() -> None:
    """exp of a log-ratio there overflowed, and zero times infinity was a NaN gradient."""
    logprobs = _logprobs(0.0, -95.0, -1.0, -1.0)
    batch = _batch(
        advantages=[0.0, 0.0, 1.0, 1.0],
        generator_logprobs=[0.0, 0.0, -1.0, -1.0],
        ref_logprobs=[0.0, 0.0, -1.0, -1.0],
    )
    batch = dataclasses.replace(batch, loss_mask_BT=torch.tensor([[False, False, True, True]]))
    _, grad = _total_and_grad(make_loss("grpo", {"kl_coef": 0.1})(logprobs, batch), logprobs)
    assert grad == pytest.approx([0.0, 0.0, -1.0, -1.0])


@pytest.mark.parametrize("advantage", [0.0, 1.0, -1.0])
def test_a_ratio_beyond_float32_gives_finite_gradients(advantage: float) -> None:
    logprobs = _logprobs(0.0, -1.0, -1.0, -1.0)
    batch = _batch(
        advantages=[0.0, advantage, 0.0, 0.0], generator_logprobs=[0.0, -300.0, -1.0, -1.0]
    )
    total, grad = _total_and_grad(make_loss("grpo")(logprobs, batch), logprobs)
    assert math.isfinite(total)
    assert all(math.isfinite(g) for g in grad)
