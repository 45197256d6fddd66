"""TitanEngine on one rank against LocalEngine in float64, and the optimizer step by hand."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim.lr_scheduler import LambdaLR

from forge_trainer.config import (
    LRScheduleConfig,
    OptimizerConfig,
    PackingConfig,
    TrainerConfig,
)
from forge_trainer.engine.local import LocalEngine
from forge_trainer.engine.titan.attention import dense_document_mask
from forge_trainer.engine.titan.engine import TitanEngine
from forge_trainer.engine.update import Counts, Updater
from forge_trainer.errors import ConfigError, DataError, EngineError, NonFiniteError
from forge_trainer.functional.losses.objective import make_loss
from forge_trainer.functional.packing import PackingPlan, pack_sequences
from forge_trainer.functional.schedules import warmup_stable_decay
from forge_trainer.hf import load_causal_lm, load_weights
from forge_trainer.protocols import Engine
from forge_trainer.types import LossOutput, OptimParams, SaveRequest, TrainBatch, TrainSequence
from tests.data import random_sequences
from tests.weights import published_by

# eps=1e-2 keeps Adam from blowing rounding noise in tiny gradients up to a full step.
CONFIG = TrainerConfig(
    device="cpu",
    optimizer=OptimizerConfig(lr=1e-2, eps=1e-2, weight_decay=0.1),
    packing=PackingConfig(max_row_tokens=48, rows_per_microbatch=2),
)


@pytest.fixture(autouse=True)
def _leave_process_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(params=["tiny_qwen3", "tiny_llama"])
def model_dir(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


@pytest.fixture(scope="module")
def engine(tiny_llama: Path) -> Iterator[TitanEngine]:
    """One for many examples; it leaves its process group at the end."""
    engine = TitanEngine(CONFIG, tiny_llama)
    engine.setup()
    yield engine
    engine.close()


def _batches(*, pack: bool = True, seed: int = 0) -> list[TrainBatch]:
    plan = PackingPlan(max_row_tokens=48, rows_per_microbatch=2, pack=pack)
    return pack_sequences(random_sequences(seed=seed), dp_size=1, plan=plan).batches[0]


def _five_steps(engine: Engine, *, pack: bool) -> list[tuple[float, float]]:
    """(loss sum, gradient norm) of each step."""
    engine.setup()
    results = []
    for step in range(5):
        loss = make_loss("grpo" if step % 2 else "reinforce")
        fb = engine.forward_backward(_batches(pack=pack, seed=step), loss)
        optim = engine.optim_step(normalize="sequences" if step % 2 else "tokens")
        results.append((fb.loss_sum, optim.grad_norm))
    return results


@pytest.mark.parametrize("pack", [True, False])
def test_titan_on_one_rank_equals_the_slow_obvious_engine(model_dir: Path, pack: bool) -> None:
    wanted = _five_steps(LocalEngine(CONFIG, model_dir, dtype=torch.float64), pack=False)
    found = _five_steps(TitanEngine(CONFIG, model_dir), pack=pack)
    for (loss, norm), (wanted_loss, wanted_norm) in zip(found, wanted, strict=True):
        assert loss == pytest.approx(wanted_loss, rel=1e-5)
        assert norm == pytest.approx(wanted_norm, rel=1e-5)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=9),
    rows=st.integers(1, 5),
    row_tokens=st.integers(20, 64),
    cut=st.integers(0, 9),
)
def test_packing_and_microbatches_never_change_the_gradient(
    engine: TitanEngine, lengths: list[int], rows: int, row_tokens: int, cut: int
) -> None:
    """Random ragged sequences in one padded call, against packed rows in two calls."""
    rng = random.Random(str(lengths))
    sequences = [
        TrainSequence(
            token_ids=[rng.randrange(260) for _ in range(length)],
            loss_mask=[0] + [rng.randrange(2) for _ in range(length - 1)],
            advantages=[rng.gauss(0, 1)] * length,
            generator_logprobs=[-5.5 + rng.gauss(0, 0.1) for _ in range(length)],
        )
        for length in lengths
    ]

    def gradient(parts: list[list[TrainSequence]], plan: PackingPlan) -> dict[str, torch.Tensor]:
        engine.clear_gradients()
        for part in filter(None, parts):
            engine.forward_backward(
                pack_sequences(part, dp_size=1, plan=plan).batches[0], make_loss("gspo")
            )
        return {
            name: parameter.grad.full_tensor().clone()
            for name, parameter in engine._model.named_parameters()
        }

    wanted = gradient([sequences], PackingPlan(64, len(sequences), pack=False))
    found = gradient([sequences[:cut], sequences[cut:]], PackingPlan(row_tokens, rows))
    whole = math.sqrt(sum(float(g.square().sum()) for g in wanted.values()))
    for name, g in wanted.items():
        assert float((found[name] - g).norm()) <= 1e-5 * whole + 1e-7, name


def test_parameters_agree_after_five_steps(model_dir: Path) -> None:
    local, titan = (
        LocalEngine(CONFIG, model_dir, dtype=torch.float64),
        TitanEngine(CONFIG, model_dir),
    )
    _five_steps(local, pack=False)
    _five_steps(titan, pack=True)
    wanted = published_by(local, torch.float64)
    found = published_by(titan, torch.float64)
    start = load_weights(model_dir)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        error = (found[name] - tensor).norm()
        # A float32 parameter cannot be nearer to the float64 one than its own rounding.
        rounding = torch.finfo(torch.float32).eps * tensor.norm()
        assert error < 1e-5 * (tensor - start[name]).norm() + rounding, f"{name}: {error}"


def test_weights_come_back_out_as_they_went_in(model_dir: Path) -> None:
    engine = TitanEngine(CONFIG, model_dir)
    engine.setup()
    pieces = published_by(engine)
    given = load_weights(model_dir)
    assert pieces.keys() == given.keys()
    for name, tensor in given.items():
        assert torch.equal(pieces[name], tensor), name


def test_logits_of_transformers_give_the_same_logprobs(model_dir: Path) -> None:
    engine = TitanEngine(CONFIG, model_dir)
    engine.setup()
    ids = [5, 9, 2, 30, 7]
    sequence = TrainSequence(ids, [0, 1, 1, 1, 1], temperature=0.7)
    filler = TrainSequence([1, 2, 3], [0, 0, 0])
    batch = pack_sequences([sequence, filler], dp_size=1, plan=PackingPlan(16, 1)).batches[0]
    output = engine.forward(batch, with_entropy=True)[0]
    model = load_causal_lm(model_dir, dtype=torch.float32, device=torch.device("cpu"))
    with torch.no_grad():
        log_p = torch.log_softmax(model(torch.tensor([ids])).logits[0] / 0.7, dim=-1)
    wanted = log_p[:-1].gather(-1, torch.tensor(ids[1:])[:, None]).squeeze(-1)
    torch.testing.assert_close(output.logprobs_BT[0, 1:5], wanted, rtol=1e-5, atol=1e-5)
    entropy = -(log_p.exp() * log_p).sum(-1)[:-1]
    assert output.entropies_BT is not None
    torch.testing.assert_close(output.entropies_BT[0, 1:5], entropy, rtol=1e-5, atol=1e-5)


def test_accumulation_over_calls_equals_one_call(tiny_qwen3: Path) -> None:
    engine = TitanEngine(CONFIG, tiny_qwen3)
    engine.setup()
    sequences, loss = random_sequences(), make_loss("reinforce")
    plan = PackingPlan(48, 2)
    for part in (sequences[:2], sequences[2:7], sequences[7:]):
        engine.forward_backward(pack_sequences(part, dp_size=1, plan=plan).batches[0], loss)
    accumulated = engine.accumulated
    split = engine.optim_step(params=OptimParams(lr=0.0, weight_decay=0.0)).grad_norm
    engine.forward_backward(_batches(), loss)
    assert engine.accumulated == accumulated
    assert engine.optim_step().grad_norm == pytest.approx(split, rel=1e-6)


@pytest.mark.parametrize("kind", [TitanEngine, LocalEngine])
def test_the_padding_token_learns_where_a_document_holds_it(
    tiny_llama: Path, kind: type[TitanEngine] | type[LocalEngine]
) -> None:
    """transformers masks the gradient of pad_token_id's embedding; LocalEngine once did, too."""
    engine = kind(CONFIG, tiny_llama)
    engine.setup()
    batch = pack_sequences(
        [TrainSequence([0, 7, 9], [0, 1, 1])], dp_size=1, plan=PackingPlan(8, 1)
    ).batches[0]
    engine.forward_backward(batch, make_loss("cross_entropy"))
    engine.optim_step(params=OptimParams(weight_decay=0.0))
    pieces = published_by(engine)
    name = "model.embed_tokens.weight"
    assert not torch.equal(pieces[name][0], load_weights(tiny_llama)[name][0])


@pytest.mark.parametrize("kind", [TitanEngine, LocalEngine])
def test_a_failing_loss_leaves_the_engine_usable(
    tiny_qwen3: Path, kind: type[TitanEngine] | type[LocalEngine]
) -> None:
    def broken(logprobs_BT: torch.Tensor, batch: TrainBatch) -> LossOutput:
        raise ZeroDivisionError("my loss")

    def mean(logprobs_BT: torch.Tensor, batch: TrainBatch) -> LossOutput:
        return LossOutput(total=logprobs_BT.mean(dim=0))

    engine = kind(CONFIG, tiny_qwen3)
    engine.setup()
    for loss, message in ((broken, "my loss"), (mean, "must be a 0-dim tensor")):
        with pytest.raises(EngineError, match=message):
            engine.forward_backward(_batches(), loss)
        assert engine.accumulated == (0, 0)
    engine.forward_backward(_batches(), make_loss("reinforce"))
    after = engine.optim_step().grad_norm
    fresh = kind(CONFIG, tiny_qwen3)
    fresh.setup()
    fresh.forward_backward(_batches(), make_loss("reinforce"))
    assert fresh.optim_step().grad_norm == after


@pytest.mark.parametrize("kind", [TitanEngine, LocalEngine])
def test_a_resumed_engine_equals_an_uninterrupted_one(
    tiny_qwen3: Path, tmp_path: Path, kind: type[TitanEngine] | type[LocalEngine]
) -> None:
    config = CONFIG.model_copy(
        update={"lr_schedule": LRScheduleConfig(warmup_steps=2, decay_steps=2, total_steps=4)}
    )

    def step(engine: Engine, seed: int) -> tuple[float, float]:
        engine.forward_backward(_batches(seed=seed), make_loss("grpo"))
        result = engine.optim_step()
        return result.grad_norm, result.learning_rate

    straight, resumed = kind(config, tiny_qwen3), kind(config, tiny_qwen3)
    straight.setup()
    step(straight, 0)
    step(straight, 1)
    straight.save(SaveRequest(str(tmp_path / "saved")))
    resumed.setup()
    info = resumed.load(str(tmp_path / "saved"))
    assert (info.step, resumed.step) == (2, 2)
    for seed in (2, 3, 4):
        assert step(straight, seed) == step(resumed, seed)
    pieces = zip(
        straight.weight_pieces(dtype=torch.float32),
        resumed.weight_pieces(dtype=torch.float32),
        strict=True,
    )
    assert all(torch.equal(one.data, other.data) for one, other in pieces)


@pytest.mark.parametrize("kind", [TitanEngine, LocalEngine])
def test_saving_before_the_first_update_changes_nothing(
    tiny_qwen3: Path, tmp_path: Path, kind: type[TitanEngine] | type[LocalEngine]
) -> None:
    """torch allocated Adam's state in the first save and counted that as a step."""
    norms = []
    for save in (False, True):
        engine = kind(CONFIG, tiny_qwen3)
        engine.setup()
        if save:
            engine.save(SaveRequest(str(tmp_path / "saved")))
        for seed in range(3):
            engine.forward_backward(_batches(seed=seed), make_loss("grpo"))
            norms.append(engine.optim_step().grad_norm)
    assert norms[:3] == norms[3:]


def test_a_directory_with_other_tensors_is_refused(tiny_qwen3: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    for file in ("config.json",):
        (tmp_path / file).write_text((tiny_qwen3 / file).read_text())
    with pytest.raises(ConfigError, match=r"no \*.safetensors file"):
        TitanEngine(CONFIG, tmp_path).setup()
    tensors = load_weights(tiny_qwen3)
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"missing tensors \['norm.weight'\]"):
        TitanEngine(CONFIG, tmp_path).setup()


def test_documents_of_a_row_do_not_see_each_other() -> None:
    mask = dense_document_mask(torch.tensor([[0, 1, 0]]))
    assert mask[0, 0].int().tolist() == [[1, 0, 0], [1, 1, 0], [0, 0, 1]]


def test_titans_schedule_is_the_documented_one(tiny_qwen3: Path) -> None:
    schedule = LRScheduleConfig(
        warmup_steps=2, decay_steps=3, total_steps=7, decay_type="cosine", min_lr_factor=0.1
    )
    config = CONFIG.model_copy(update={"lr_schedule": schedule})
    engine = TitanEngine(config, tiny_qwen3)
    engine.setup()
    for step in range(9):
        engine.forward_backward(_batches(), make_loss("reinforce"))
        factor = warmup_stable_decay(
            step,
            warmup_steps=2,
            decay_steps=3,
            total_steps=7,
            decay_type="cosine",
            min_lr_factor=0.1,
        )
        assert engine.optim_step().learning_rate == pytest.approx(1e-2 * factor), step


def _updater(parameter: torch.nn.Parameter, *, on_non_finite: str = "raise") -> Updater:
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    return Updater(
        TrainerConfig.model_validate({"on_non_finite": on_non_finite}),
        optimizers=[optimizer],
        schedulers=[LambdaLR(optimizer, lambda step: 1.0 / (step + 1))],
        reduce_counts=lambda counts: counts,
        sum_over_ranks=lambda value: value,
        rank=0,
    )


def _accumulate(updater: Updater, parameter: torch.nn.Parameter, *grads: float) -> None:
    parameter.grad = torch.tensor(grads)
    updater.add(Counts(sequences=2, tokens=10))


def test_one_scalar_divides_and_clips() -> None:
    """Sums [30, 40] over 10 tokens: gradient [3, 4], norm 5, clipped to [0.6, 0.8], lr 0.5."""
    parameter = torch.nn.Parameter(torch.zeros(2))
    updater = _updater(parameter)
    _accumulate(updater, parameter, 30.0, 40.0)
    result = updater.optim_step(normalize="tokens", params=None)
    assert result.grad_norm == pytest.approx(5.0)
    assert parameter.tolist() == pytest.approx([-0.3, -0.4])
    assert (result.step, updater.accumulated, parameter.grad) == (1, Counts(), None)


@pytest.mark.parametrize(
    ("normalize", "norm"), [("tokens", 0.05), ("sequences", 0.25), ("none", 0.5)]
)
def test_normalize_names_the_divisor(normalize: str, norm: float) -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    updater = _updater(parameter)
    _accumulate(updater, parameter, 0.3, 0.4)
    result = updater.optim_step(normalize=normalize, params=None)  # type: ignore[arg-type]
    assert result.grad_norm == pytest.approx(norm)
    assert parameter.norm().item() == pytest.approx(0.5 * norm)


def test_optim_params_hold_for_one_step() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    updater = _updater(parameter)
    _accumulate(updater, parameter, 30.0, 40.0)
    params = OptimParams(lr=2.0, max_grad_norm=100.0)
    assert updater.optim_step(normalize="tokens", params=params).learning_rate == 2.0
    assert parameter.tolist() == pytest.approx([-6.0, -8.0])
    _accumulate(updater, parameter, 3.0, 4.0)
    # The schedule went on: 0.5 / 2.
    assert updater.optim_step(normalize="tokens", params=None).learning_rate == 0.25


def test_a_step_without_targets_is_a_data_error() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    updater = _updater(parameter)
    parameter.grad = torch.ones(2)
    for normalize in ("tokens", "sequences", "none"):
        with pytest.raises(DataError, match="no target token"):
            updater.optim_step(normalize=normalize, params=None)
    assert updater.step == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_gradients_change_nothing(bad: float) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    updater = _updater(parameter)
    _accumulate(updater, parameter, 1.0, bad)
    with pytest.raises(NonFiniteError, match=r"rank 0, phase optim_step, step 0"):
        updater.optim_step(normalize="tokens", params=None)
    assert parameter.tolist() == [1.0, 1.0]
    assert (updater.step, updater.accumulated) == (0, Counts())
    skipping = _updater(parameter, on_non_finite="skip")
    _accumulate(skipping, parameter, 1.0, bad)
    result = skipping.optim_step(normalize="tokens", params=None)
    assert (result.skipped, result.step, skipping.step) == (True, 0, 0)
    assert result.metrics["trainer/skipped_steps"].value == 1.0
    assert parameter.tolist() == [1.0, 1.0]
