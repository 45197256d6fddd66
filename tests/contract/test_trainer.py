"""What other systems promise of a trainer, as claims about ours.

After TorchRL's Learner tests and verl's BaseEngine: an update changes weights, the loss falls,
accumulation defers, weights out are plain copies, a checkpoint keeps momentum, what is not a loss
is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forge_trainer.errors import DataError, EngineError, WeightsError
from forge_trainer.types import LossOutput, OptimParams, TrainBatch
from tests.contract.conftest import Subject
from tests.data import random_sequences, same_numbers

DATA = random_sequences(6)


def _equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def _step(subject: Subject, **options: Any) -> Any:
    return subject.run(subject.trainer.train_step(DATA, loss="cross_entropy", **options))


def test_an_update_changes_the_weights_and_counts(subject: Subject) -> None:
    _, before = subject.pushed()
    assert _step(subject).optim.step == 1
    ref, after = subject.pushed()
    assert ref.version.policy_version == 1
    assert after.keys() == before.keys()
    assert not _equal(before, after)


def test_the_loss_falls_over_twenty_updates(subject: Subject) -> None:
    losses = [_step(subject).forward_backward.metrics["loss/mean"].value for _ in range(20)]
    assert losses[-1] < 0.8 * losses[0]


def test_accumulation_defers_the_update(subject: Subject) -> None:
    """Two halves give the update of the whole, and nothing moves before it."""
    trainer = subject.trainer
    whole = _step(subject).optim.grad_norm
    _, wanted = subject.pushed()
    subject.reset()
    _, before = subject.pushed()
    for half in (DATA[:2], DATA[2:]):
        subject.run(trainer.forward_backward(half, loss="cross_entropy"))
    status = subject.run(trainer.get_status())
    assert (status.step, status.accumulated_sequences > 0) == (0, True)
    assert subject.run(trainer.forward(DATA)).logprobs
    result = subject.run(trainer.optim_step())
    assert result.grad_norm == pytest.approx(whole, rel=1e-5)
    _, found = subject.pushed()
    assert not _equal(before, found)
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)


def test_a_forward_in_between_changes_nothing_that_follows(subject: Subject) -> None:
    """FSDP kept what it had gathered for it, and the update after it was never seen."""
    trainer = subject.trainer
    found = []
    for forward in (False, True):
        subject.reset()
        subject.run(trainer.forward_backward(DATA, loss="cross_entropy"))
        if forward:
            subject.run(trainer.forward(DATA))
        subject.run(trainer.optim_step())
        found.append((subject.run(trainer.forward(DATA)).logprobs, _step(subject).optim.grad_norm))
    (one, one_norm), (other, other_norm) = found
    assert same_numbers(one, other)
    assert one_norm == other_norm


def test_gradients_can_be_dropped(subject: Subject) -> None:
    wanted = _step(subject).optim.grad_norm
    subject.reset()
    subject.run(subject.trainer.forward_backward(DATA[:1], loss="cross_entropy"))
    subject.run(subject.trainer.clear_gradients())
    assert _step(subject).optim.grad_norm == wanted


def test_an_update_without_a_gradient_is_refused(subject: Subject) -> None:
    with pytest.raises(DataError, match="no target token"):
        subject.run(subject.trainer.optim_step())


def test_weights_out_are_plain_tensors_that_do_not_alias_live_ones(subject: Subject) -> None:
    _, before = subject.pushed()
    copies = {name: tensor.clone() for name, tensor in before.items()}
    assert all(type(tensor) is Tensor for tensor in before.values())
    _step(subject)
    assert _equal(before, copies)


def test_a_version_is_published_once_and_is_the_step(subject: Subject) -> None:
    subject.pushed()
    with pytest.raises(WeightsError, match="published already"):
        subject.run(subject.trainer.push_weights())
    with pytest.raises(WeightsError, match="is not the current step"):
        subject.run(subject.trainer.push_weights(policy_version=7))


def test_a_checkpoint_keeps_momentum(subject: Subject, tmp_path: Path) -> None:
    """The update after a load is the one that would have come; Adam's state decides it."""
    _step(subject)
    _step(subject)
    saved = subject.run(subject.trainer.save(path=str(tmp_path / "saved")))
    norm = _step(subject).optim.grad_norm
    _, wanted = subject.pushed()
    subject.run(subject.trainer.load(path=saved.path))
    assert _step(subject).optim.grad_norm == norm
    assert _equal(subject.pushed()[1], wanted)


def test_a_save_beside_training_holds_the_state_of_its_call(
    subject: Subject, tmp_path: Path
) -> None:
    _step(subject)
    _, wanted = subject.pushed()
    saving = subject.run(subject.trainer.save(path=str(tmp_path / "saved"), wait=False))
    norm = _step(subject).optim.grad_norm
    done = subject.run(subject.trainer.wait_for_save())
    assert (saving.complete, done.complete, done.path) == (False, True, saving.path)
    subject.run(subject.trainer.load(path=saving.path))
    assert _equal(subject.pushed()[1], wanted)
    assert _step(subject).optim.grad_norm == norm


def test_modes_and_moves_change_no_value(subject: Subject) -> None:
    wanted = subject.run(subject.trainer.forward(DATA)).logprobs
    subject.run(subject.trainer.train_mode())
    subject.run(subject.trainer.eval_mode())
    subject.run(subject.trainer.to("cpu"))
    assert same_numbers(subject.run(subject.trainer.forward(DATA)).logprobs, wanted)
    with pytest.raises(EngineError, match="this trainer runs on cpu"):
        subject.run(subject.trainer.to("cuda"))


def test_clipping_covers_what_is_stepped(subject: Subject) -> None:
    """With an eps beyond all gradients, Adam moves by lr * gradient / eps: the clipped one."""
    _, before = subject.pushed()
    params = OptimParams(lr=1.0, eps=1e4, max_grad_norm=1e-2, weight_decay=0.0)
    result = _step(subject, params=params)
    assert result.optim.grad_norm > 1e-2
    _, after = subject.pushed()
    squares = [float((after[n] - before[n]).double().square().sum()) for n in before]
    assert sum(squares) ** 0.5 * 1e4 == pytest.approx(1e-2, rel=0.05)


def _unreduced(logprobs_BT: Tensor, batch: TrainBatch) -> LossOutput:
    return LossOutput(total=-logprobs_BT)


def _nothing(logprobs_BT: Tensor, batch: TrainBatch) -> LossOutput:
    return None  # type: ignore[return-value]


def _constant(logprobs_BT: Tensor, batch: TrainBatch) -> LossOutput:
    return LossOutput(total=torch.zeros(()))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (_unreduced, "0-dim tensor"),
        (_nothing, "must return LossOutput"),
        (_constant, "does not depend on the log-probs"),
    ],
)
def test_what_is_not_a_loss_is_refused(subject: Subject, loss: Any, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        subject.run(subject.trainer.forward_backward(DATA, loss=loss))
    assert _step(subject).optim.step == 1
