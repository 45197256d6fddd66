"""Corrections of off-policy tokens: by hand, and against loops over tokens in float64."""

from __future__ import annotations

import dataclasses
import inspect
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from forge_trainer.config import AlgorithmConfig
from forge_trainer.controller.checks import check_algorithm
from forge_trainer.errors import ConfigError
from forge_trainer.functional.losses.correcting import CORRECTIONS, RANGES
from forge_trainer.functional.losses.fields import required_fields
from forge_trainer.functional.losses.objective import LOSSES, make_loss
from forge_trainer.functional.packing import PackingPlan, pack_sequences
from forge_trainer.metrics import as_floats, merge_metrics
from forge_trainer.types import TrainBatch, TrainSequence

ACTING: dict[str, list[dict[str, Any]]] = {
    "tis": [{}, {"level": "sequence", "weight_cap": 1.1}],
    "mis": [{"weight_high": 1.5}, {"level": "token", "weight_low": 0.6, "weight_high": 1.5}],
    "icepop": [{}, {"weight_low": 0.9, "weight_high": 1.2}],
    "kpop": [{"max_kl": 0.05}],
    "decoupled": [{"weight_high": 1.5}],
    "geo_mask": [{"geo_low": 0.8, "geo_high": 1.2}, {"geo_high": 9.0, "outlier_low": 0.5}],
    "dppo": [{"max_rise": 0.05, "max_fall": 0.08}],
}
"""Options with which some tokens of `_sequences` are touched, and some are not."""
CASES = [
    pytest.param(name, options, old, id=f"{name}{i}-{'old' if old else 'now'}")
    for name, given in ACTING.items()
    for i, options in enumerate(given)
    for old in ([True] if name == "decoupled" else [True, False])
]


def _batch(**fields: Sequence[float]) -> TrainBatch:
    """One row of two documents, [a b] and [c]; the first token of each is no target."""
    given: dict[str, Any] = {f"{name}_BT": torch.tensor([v]) for name, v in fields.items()}
    return TrainBatch(
        token_ids_BT=torch.zeros(1, 5, dtype=torch.int64),
        positions_BT=torch.tensor([[0, 1, 2, 0, 1]]),
        document_ids_BT=torch.tensor([[0, 0, 0, 1, 1]]),
        loss_mask_BT=torch.tensor([[False, True, True, False, True]]),
        temperatures_BT=torch.ones(1, 5),
        **given,
    )


def _logs(a: float, b: float, c: float) -> list[float]:
    """Log-probs of the three targets from their probabilities; nonsense elsewhere."""
    return [7.0, math.log(a), math.log(b), -9.0, math.log(c)]


def _outcome(
    loss: str,
    options: dict[str, Any],
    *,
    pi: Sequence[float],
    mu: Sequence[float],
    old: Sequence[float] | None = None,
    advantages: Sequence[float] = (1.0, 1.0, 1.0),
) -> tuple[float, list[float], float]:
    """Total, the gradient of the three targets, and the share that the correction touched."""
    a, b, c = advantages
    logprobs = torch.tensor([_logs(*pi)], requires_grad=True)
    batch = _batch(advantages=[5.0, a, b, 5.0, c], generator_logprobs=_logs(*mu))
    if old is not None:
        batch = dataclasses.replace(batch, old_logprobs_BT=torch.tensor([_logs(*old)]))
    output = make_loss(loss, options)(logprobs, batch)
    (grad,) = torch.autograd.grad(output.total, logprobs)
    assert grad[0, [0, 3]].tolist() == [0.0, 0.0]
    share = output.metrics["loss/corrected"].value
    return output.total.item(), grad[0, [1, 2, 4]].tolist(), share


def test_tis_caps_each_tokens_weight() -> None:
    """k = 0.2/0.1, 0.1/0.2, 0.4/0.1 = 2, 0.5, 4 -> v = 1.5, 0.5, 1.5; reinforce: -v A log pi."""
    total, grad, share = _outcome(
        "reinforce",
        {"correction": "tis", "weight_cap": 1.5},
        pi=(0.2, 0.1, 0.4),
        mu=(0.1, 0.2, 0.1),
        advantages=(1.0, -2.0, 1.0),
    )
    assert grad == pytest.approx([-1.5, 1.0, -1.5])
    logs = (math.log(0.2), math.log(0.1), math.log(0.4))
    assert total == pytest.approx(-(1.5 * logs[0] - 2 * 0.5 * logs[1] + 1.5 * logs[2]))
    assert share == pytest.approx(2 / 3)


def test_tis_of_a_sequence_caps_the_product() -> None:
    """Products: 2 * 0.9 = 1.8 below the cap of 2 for both tokens, 4 above it."""
    options = {"correction": "tis", "level": "sequence"}
    _, grad, share = _outcome(
        "reinforce", options, pi=(0.2, 0.18, 0.4), mu=(0.1, 0.2, 0.1), advantages=(1.0, 1.0, -1.0)
    )
    assert grad == pytest.approx([-1.8, -1.8, 2.0])
    assert share == pytest.approx(1 / 3)


def test_mis_leaves_out_a_sequence_whose_product_is_too_large() -> None:
    """Products: 2 * 1.6 = 3.2 above 3, so neither token counts; 2.5 below."""
    options = {"correction": "mis"}
    given: dict[str, Any] = {"pi": (0.2, 0.32, 0.5), "mu": (0.1, 0.2, 0.2)}
    _, grad, share = _outcome("reinforce", options, **given)
    assert grad == pytest.approx([0.0, 0.0, -2.5])
    assert share == pytest.approx(2 / 3)
    # Per token, 2, 1.6 and 2.5 are all in.
    options = {"correction": "mis", "level": "token"}
    assert _outcome("reinforce", options, **given)[1] == pytest.approx([-2.0, -1.6, -2.5])


def test_icepop_keeps_weights_between_its_bounds() -> None:
    """k = 0.04/0.1, 0.2/0.2, 0.55/0.1 = 0.4, 1, 5.5 -> v = 0, 1, 0."""
    _, grad, share = _outcome(
        "reinforce", {"correction": "icepop"}, pi=(0.04, 0.2, 0.55), mu=(0.1, 0.2, 0.1)
    )
    assert grad == pytest.approx([0.0, -1.0, 0.0])
    assert share == pytest.approx(2 / 3)


def test_kpop_measures_a_token_against_all_others() -> None:
    """A ratio of 10 at 0.02 is near, D = 0.03; one of 9.9 at 0.99 is far, D = 3.8; so is 1/9.9.

    D(0.02 || 0.002) = 0.02 log 10 + 0.98 log(0.98/0.998) = 0.0282
    D(0.1 || 0.99) = 0.1 log(0.1/0.99) + 0.9 log(0.9/0.01) = 3.82, whichever of them is mu.
    """
    options = {"correction": "kpop"}
    _, grad, share = _outcome("reinforce", options, pi=(0.02, 0.99, 0.1), mu=(0.002, 0.1, 0.99))
    assert grad == pytest.approx([-10.0, 0.0, 0.0], rel=1e-5)
    assert share == pytest.approx(2 / 3)
    for bound, kept in ((0.0283, True), (0.0281, False)):
        tight = {"correction": "kpop", "max_kl": bound}
        _, grad, _ = _outcome("reinforce", tight, pi=(0.02, 0.1, 0.1), mu=(0.002, 0.1, 0.1))
        assert (grad[0] != 0) is kept


def test_decoupled_ppo_clips_against_the_proximal_policy() -> None:
    """k = pi_o/mu = 1.2, 6, 0.5; u = pi/pi_o = 1.5, 1, 1.1; bounds 0.8 and 1.2; A = 1, 1, -2.

    The first is clipped: -1.2 * 1.2, without gradient. The second weighs more than 5: left out.
    The third: -0.5 * (1.1 * -2) = 1.1, which is its gradient, too.
    """
    total, grad, share = _outcome(
        "ppo",
        {"correction": "decoupled"},
        pi=(0.36, 0.6, 0.11),
        old=(0.24, 0.6, 0.10),
        mu=(0.2, 0.1, 0.2),
        advantages=(1.0, 1.0, -2.0),
    )
    assert total == pytest.approx(-1.44 + 1.1)
    assert grad == pytest.approx([0.0, 0.0, 1.1])
    assert share == pytest.approx(1 / 3)


def test_geo_mask_takes_the_mean_whatever_the_length() -> None:
    """Means of log k: (log 1.02 + log 0.99)/2 = 0.0049, within log 1.01; log 1.02, beyond it.

    Kept tokens keep the loss's own ratio pi/mu: gradients -1.02 and -0.99.
    """
    options = {"correction": "geo_mask"}
    pi, mu = (0.204, 0.198, 0.51), (0.2, 0.2, 0.5)
    _, grad, share = _outcome("importance_sampling", options, pi=pi, mu=mu)
    assert grad == pytest.approx([-1.02, -0.99, 0.0], rel=1e-5)
    assert share == pytest.approx(1 / 3)
    # With pi_o, which is what the mask looks at, the ratio is pi/pi_o: 1.1 for all three.
    now = tuple(1.1 * p for p in pi)
    _, grad, share = _outcome("importance_sampling", options, pi=now, old=pi, mu=mu)
    assert grad == pytest.approx([-1.1, -1.1, 0.0], rel=1e-5)


def test_geo_mask_drops_a_sequence_with_an_outlier() -> None:
    """k = 200 and 1/200 have the mean 1, but 200 > 100; k = 1/20000 < 1e-4."""
    options = {"correction": "geo_mask", "geo_low": 0.0, "geo_high": 1e6}
    pi, mu = (0.8, 0.004, 0.5), (0.004, 0.8, 0.5)
    assert _outcome("reinforce", options, pi=pi, mu=mu)[1] == [0.0, 0.0, -1.0]
    pi, mu = (0.8, 0.4, 0.5 / 20_000), (0.8, 0.4, 0.5)
    assert _outcome("reinforce", options, pi=pi, mu=mu)[1] == [-1.0, -1.0, 0.0]


@pytest.mark.parametrize(
    ("advantages", "wanted"),
    [
        ((1.0, 1.0, 1.0), [0.0, -0.2 / 0.5, -1.0]),
        ((-1.0, -1.0, -1.0), [0.5 / 0.2, 0.0, 1.0]),
        ((0.0, 0.0, 0.0), [0.0, 0.0, 0.0]),
    ],
)
def test_dppo_leaves_out_what_goes_further_away(
    advantages: tuple[float, float, float], wanted: list[float]
) -> None:
    """pi - mu = 0.3, -0.3, 0: up is too far with A > 0, down with A < 0; the ratio is pi/mu."""
    options = {"correction": "dppo"}
    _, grad, _ = _outcome(
        "importance_sampling",
        options,
        pi=(0.5, 0.2, 0.4),
        mu=(0.2, 0.5, 0.4),
        old=(0.1, 0.9, 0.9),
        advantages=advantages,
    )
    assert grad == pytest.approx(wanted, rel=1e-5)


def test_weights_count_the_mismatch_once() -> None:
    """k = 3: tis with a cap that does not act gives what the plain ratio pi/mu gives, 3 A."""
    given: dict[str, Any] = {"pi": (0.3, 0.3, 0.3), "mu": (0.1, 0.3, 0.3)}
    options = {"correction": "tis", "weight_cap": 10.0}
    assert _outcome("importance_sampling", options, **given)[1] == pytest.approx([-3.0, -1.0, -1.0])


def _sequences(*, old: bool, seed: int = 0) -> list[TrainSequence]:
    """Ragged, some without targets; pi is made by `_policy`."""
    rng = random.Random(seed)
    sequences = []
    for length in (7, 1, 4, 9, 2, 5, 12, 3):
        mu = [rng.uniform(-2.5, -0.2) for _ in range(length)]
        column = [min(x + rng.gauss(0, 0.8), -0.01) for x in mu]
        sequences.append(
            TrainSequence(
                token_ids=[rng.randrange(50) for _ in range(length)],
                loss_mask=[0] + [int(rng.random() < 0.8) for _ in range(length - 1)],
                advantages=[rng.gauss(0, 1)] * length,
                generator_logprobs=mu,
                old_logprobs=column if old else None,
                token_weights=[rng.uniform(0.5, 1.5) for _ in range(length)],
                extra={"noise": [rng.gauss(0, 0.8) for _ in range(length)]},
            )
        )
    return sequences


def _policy(batch: TrainBatch) -> Tensor:
    """Log-probs near the generator's, in float64."""
    assert batch.generator_logprobs_BT is not None
    logprobs_BT = batch.generator_logprobs_BT.double() + batch.extra["noise"].double()
    return logprobs_BT.clamp(max=-0.01).requires_grad_()


def _double(batch: TrainBatch) -> TrainBatch:
    changed: dict[str, Any] = {
        f.name: value.double()
        for f in dataclasses.fields(batch)
        if isinstance(value := getattr(batch, f.name), Tensor) and value.is_floating_point()
    }
    return dataclasses.replace(batch, **changed)


def _slow_weights(
    name: str, options: Mapping[str, Any], tokens: list[dict[str, float]]
) -> list[float]:
    """v of every target of one document, as the formulas say it."""
    k = [math.exp(t["old"] - t["mu"]) for t in tokens]
    product = math.prod(k)
    if name == "tis":
        cap = options.get("weight_cap", 2.0)
        return [min(product if options.get("level") == "sequence" else x, cap) for x in k]
    if name in ("mis", "icepop", "decoupled"):
        low = options.get("weight_low", 0.5 if name == "icepop" else 0.0)
        high = options.get("weight_high", 3.0 if name == "mis" else 5.0)
        whole = name == "mis" and options.get("level") != "token"
        return [x if low <= x <= high else 0.0 for x in ([product] * len(k) if whole else k)]
    if name == "kpop":

        def far(p: float, q: float) -> float:
            return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))

        pairs = [(math.exp(t["old"]), math.exp(t["mu"])) for t in tokens]
        near = [max(far(p, q), far(q, p)) <= options["max_kl"] for p, q in pairs]
        return [x if ok else 0.0 for x, ok in zip(k, near, strict=True)]
    if name == "geo_mask":
        mean = product ** (1 / len(k)) if k else 1.0
        ok = options.get("geo_low", 0.99) <= mean <= options.get("geo_high", 1.01)
        ok = ok and all(options.get("outlier_low", 1e-4) <= x <= 100 for x in k)
        return [float(ok)] * len(k)
    assert name == "dppo"
    rises = [math.exp(t["pi"]) - math.exp(t["mu"]) for t in tokens]
    return [
        0.0
        if (t["A"] > 0 and rise > options["max_rise"])
        or (t["A"] < 0 and -rise > options["max_fall"])
        else 1.0
        for t, rise in zip(tokens, rises, strict=True)
    ]


def _slow(
    loss: str, name: str, options: Mapping[str, Any], batch: TrainBatch, logprobs: Tensor
) -> tuple[float, list[list[float]]]:
    """Total and gradient, one document after another, one token after another."""
    total, grad = 0.0, torch.zeros_like(logprobs).tolist()
    old_BT = logprobs if batch.old_logprobs_BT is None else batch.old_logprobs_BT
    columns = {
        "pi": logprobs,
        "old": old_BT,
        "mu": batch.generator_logprobs_BT,
        "A": batch.advantages_BT,
        "w": batch.token_weights_BT,
    }
    numbers = {key: column.tolist() for key, column in columns.items() if column is not None}
    places: dict[int, list[tuple[int, int]]] = {}
    for b, t in batch.loss_mask_BT.nonzero().tolist():
        places.setdefault(int(batch.document_ids_BT[b, t]), []).append((b, t))
    has_old = batch.old_logprobs_BT is not None
    to_old = name not in ("geo_mask", "dppo") or (name == "geo_mask" and has_old)
    for where in places.values():
        tokens = [{key: rows[b][t] for key, rows in numbers.items()} for b, t in where]
        for (b, t), one, v in zip(where, tokens, _slow_weights(name, options, tokens), strict=True):
            if v == 0.0:
                continue
            if loss == "reinforce":
                value, slope = one["A"] * one["pi"], one["A"]
            else:
                r = math.exp(one["pi"] - one["old" if to_old else "mu"])
                plain, clipped = r * one["A"], min(max(r, 0.8), 1.2) * one["A"]
                value, slope = min(plain, clipped), plain if plain <= clipped else 0.0
            total -= one["w"] * v * value
            grad[b][t] = -one["w"] * v * slope
    return total, grad


@pytest.mark.parametrize("loss", ["grpo", "reinforce"])
@pytest.mark.parametrize(("name", "options", "old"), CASES)
def test_packed_documents_give_what_loops_over_tokens_give(
    loss: str, name: str, options: dict[str, Any], old: bool
) -> None:
    plan = PackingPlan(max_row_tokens=16, rows_per_microbatch=3)
    objective = make_loss(loss, {"correction": name, **options})
    touched = []
    for packed in pack_sequences(_sequences(old=old), dp_size=1, plan=plan).batches[0]:
        batch = _double(packed)
        logprobs = _policy(batch)
        output = objective(logprobs, batch)
        (grad,) = torch.autograd.grad(output.total, logprobs)
        wanted, wanted_grad = _slow(loss, name, options, batch, logprobs.detach())
        assert output.total.item() == pytest.approx(wanted, rel=1e-9, abs=1e-9)
        torch.testing.assert_close(grad, torch.tensor(wanted_grad, dtype=torch.float64))
        touched.append(output.metrics)
        single = objective(logprobs.detach().float().requires_grad_(), packed)
        assert single.total.item() == pytest.approx(wanted, rel=1e-5, abs=1e-5)
    share = merge_metrics(as_floats(metrics) for metrics in touched)["loss/corrected"].value
    assert 0 < share < 1, "the case tests nothing"


@pytest.mark.parametrize(("name", "options", "old"), CASES)
def test_how_documents_are_packed_changes_nothing(
    name: str, options: dict[str, Any], old: bool
) -> None:
    """Gradients by sequence: rows of several documents, against one document per row."""
    objective = make_loss(
        "gspo", {"correction": name, "ratio_low": 0.5, "ratio_high": 2.0, **options}
    )
    found = []
    for plan in (PackingPlan(32, 4), PackingPlan(16, 8, pack=False), PackingPlan(12, 1)):
        gradients: dict[int, list[float]] = {}
        for packed in pack_sequences(_sequences(old=old), dp_size=1, plan=plan).batches[0]:
            batch = _double(packed)
            logprobs = _policy(batch)
            (grad,) = torch.autograd.grad(objective(logprobs, batch).total, logprobs)
            for index in batch.document_ids_BT.unique().tolist():
                gradients[index] = grad[batch.document_ids_BT == index].tolist()
        gradients.pop(-1, None)
        found.append(gradients)
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        for index, wanted in found[0].items():
            assert other[index] == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("loss", sorted(LOSSES))
@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize("seed", [0, 1])
def test_where_the_policies_agree_a_correction_changes_nothing(
    loss: str, name: str, seed: int
) -> None:
    """With pi = pi_o = mu, total and gradient are those without it, for every loss."""
    plan = PackingPlan(max_row_tokens=16, rows_per_microbatch=3)
    for packed in pack_sequences(_sequences(old=True, seed=seed), dp_size=1, plan=plan).batches[0]:
        mu = packed.generator_logprobs_BT
        assert mu is not None
        batch = dataclasses.replace(packed, old_logprobs_BT=mu)
        results = []
        for options in ({}, {"correction": name}):
            logprobs = mu.clone().requires_grad_()
            output = make_loss(loss, options)(logprobs, batch)
            results.append((output.total, *torch.autograd.grad(output.total, logprobs)))
        torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-6)
        assert output.metrics["loss/corrected"].value == 0.0
        assert output.metrics["loss/correction_weight"].value == pytest.approx(1.0)


@pytest.mark.parametrize("name", ["icepop", "mis", "kpop"])
def test_a_token_left_out_has_no_gradient_in_a_sequences_ratio_either(name: str) -> None:
    """gspo's ratio is a mean over the sequence: what is left out is not in it."""
    options = {"correction": name, "level": "token"} if name == "mis" else {"correction": name}
    pi, mu = (0.2, 0.99, 0.3), (0.2, 0.05, 0.3)
    _, grad, share = _outcome("gspo", options, pi=pi, mu=mu)
    assert grad == pytest.approx([-1.0, 0.0, -1.0])
    assert share == pytest.approx(1 / 3)


def test_terms_keep_every_token() -> None:
    """k3 = x - ln x - 1 of p_ref/p = 2 at all three, though icepop leaves out the first."""
    batch = _batch(
        advantages=[0.0] * 5,
        generator_logprobs=_logs(0.01, 0.2, 0.2),
        ref_logprobs=_logs(0.4, 0.4, 0.4),
    )
    loss = make_loss("grpo", {"correction": "icepop", "kl_coef": 1.0})
    output = loss(torch.tensor([_logs(0.2, 0.2, 0.2)], requires_grad=True), batch)
    assert output.total.item() == pytest.approx(3 * (2 - math.log(2) - 1), rel=1e-5)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_far_apart_policies_give_finite_gradients(name: str) -> None:
    """Also where nothing at all is left: zero, and connected to the log-probs."""
    logprobs = torch.tensor([[0.0, -400.0, 0.0, 0.0, -1e-9]], requires_grad=True)
    batch = _batch(
        advantages=[0.0, 1.0, -1.0, 0.0, 1.0],
        generator_logprobs=[0.0, 0.0, -400.0, 0.0, -300.0],
        old_logprobs=[0.0, -300.0, 0.0, 0.0, 0.0],
    )
    output = make_loss("grpo", {"correction": name})(logprobs, batch)
    (grad,) = torch.autograd.grad(output.total, logprobs)
    assert torch.isfinite(grad).all()
    assert math.isfinite(output.total.item())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"correction": "tiss"}, r"correction is 'tiss'; use one of \['tis', 'mis'"),
        ({"correction": {"name": "tis"}}, "correction is {'name': 'tis'}; use one of"),
        ({"correction": "tis", "weight_high": 2}, "no option .'weight_high'.; it takes .*'level'"),
        ({"weight_cap": 2}, "it takes .*'correction'.; weight_cap belongs to correction: tis"),
        ({"correction": "icepop", "weight_low": 1.5}, "weight_low is 1.5; it must be .* 0 to 1"),
        ({"correction": "tis", "weight_cap": "2"}, "weight_cap is '2'; it must be a number"),
        ({"correction": "tis", "weight_cap": math.nan}, "weight_cap is nan"),
        ({"correction": "mis", "level": "document"}, "level is 'document'; use one of"),
        ({"correction": "dppo", "max_rise": 0}, "max_rise is 0"),
    ],
)
def test_options_of_corrections_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"algorithm.loss_options: .*{message}"):
        check_algorithm(AlgorithmConfig(loss_options=options))


def test_every_option_has_a_range_and_a_default_within_it() -> None:
    for registered in CORRECTIONS.values():
        for name, parameter in list(inspect.signature(registered.weigh).parameters.items())[1:]:
            if name != "level":
                low, high = RANGES[name]
                assert low <= parameter.default <= high, name


def test_a_correction_needs_its_fields() -> None:
    assert required_fields("reinforce", {"correction": "tis"}) == (
        "advantages",
        "generator_logprobs",
    )
    assert "old_logprobs" in required_fields("ppo", {"correction": "decoupled"})
    assert "advantages" in required_fields("cross_entropy", {"correction": "dppo"})
    assert "old_logprobs" in required_fields("dro", {"correction": "icepop"})
    assert "old_logprobs" not in required_fields("dro", {"correction": "geo_mask"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss_options": {"correction": "decoupled"}}, "decoupled needs the trainer's log-probs"),
        ({"loss": "dro", "loss_options": {"correction": "tis"}}, "tis needs the trainer's"),
        (
            {"loss_options": {"correction": "icepop"}, "epochs": 2},
            "icepop makes 2 updates from a batch and clips",
        ),
        ({"recompute_logprobs": True}, "compares with the generator alone"),
        (
            {"recompute_logprobs": True, "loss_options": {"correction": "dppo"}},
            "dppo compares with the generator alone",
        ),
    ],
)
def test_recomputed_logprobs_are_asked_for_where_they_count(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_algorithm(AlgorithmConfig.model_validate(changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"loss_options": {"correction": "tis"}},
        {"loss_options": {"correction": "decoupled"}, "recompute_logprobs": True, "epochs": 3},
        {"loss": "reinforce", "loss_options": {"correction": "tis"}, "epochs": 2},
        {"loss_options": {"correction": "geo_mask"}, "minibatches": 2},
        {"loss_options": {"correction": "geo_mask"}, "recompute_logprobs": True},
        {"loss": "tests.e2e.losses:talking_grpo", "recompute_logprobs": True},
    ],
)
def test_combinations_that_say_one_thing_are_taken(changes: dict[str, Any]) -> None:
    check_algorithm(AlgorithmConfig.model_validate(changes))


def test_old_logprobs_travel_with_their_tokens() -> None:
    sequences = _sequences(old=True)
    batches = pack_sequences(sequences, dp_size=1, plan=PackingPlan(16, 2)).batches[0]
    for batch in batches:
        assert batch.old_logprobs_BT is not None
        for index in set(batch.document_ids_BT.unique().tolist()) - {-1}:
            found = batch.old_logprobs_BT[batch.document_ids_BT == index].numpy()
            wanted = np.asarray(sequences[index].old_logprobs, np.float32)
            assert np.array_equal(found, wanted)
