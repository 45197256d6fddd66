"""The equivalence matrix: however the work is split, the gradient is that of one float64 process.

Layouts x packing x number of calls x distribution of targets, each with a loss and a way to
normalise; every loss and every correction of off-policy tokens occurs. Reference: LocalEngine in
float64, one document at a time.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forge_trainer.config import (
    OptimizerConfig,
    PackingConfig,
    ParallelConfig,
    TinyModelConfig,
    TrainerConfig,
)
from forge_trainer.engine.local import LocalEngine
from forge_trainer.functional.losses.correcting import CORRECTIONS
from forge_trainer.functional.losses.objective import LOSSES, make_loss
from forge_trainer.functional.packing import PackingPlan, pack_sequences
from forge_trainer.hf import create_tiny_model, load_causal_lm, load_weights
from forge_trainer.metrics import merge_metrics, metric_values
from forge_trainer.types import EngineForwardBackward, Normalize, SaveRequest, TrainSequence, World
from tests.data import random_sequences
from tests.ranks import RankPool

LAYOUTS = {
    "one": (1, ParallelConfig()),
    "fsdp2": (2, ParallelConfig()),
    "hsdp": (4, ParallelConfig(data_replicate=2)),
    "tp2": (2, ParallelConfig(tensor=2)),
    "pp2": (2, ParallelConfig(pipeline=2)),
    "fsdp2_tp2": (4, ParallelConfig(tensor=2)),
    "fsdp2_pp2": (4, ParallelConfig(pipeline=2)),
}
STEPS = 3


@dataclass(frozen=True)
class Case:
    """One cell of the matrix."""

    pack: bool
    calls: int
    targets: str
    loss: str
    options: dict[str, Any]
    normalize: Normalize
    seed: int

    @property
    def name(self) -> str:
        packed = "packed" if self.pack else "unpacked"
        correction = self.options.get("correction", "plain")
        return f"{packed}-{self.calls}calls-{self.targets}-{self.loss}-{correction}"


CORRECTED: dict[str, dict[str, Any]] = {
    "tis": {"weight_cap": 1.05},
    "mis": {"weight_low": 0.8, "weight_high": 1.2},
    "icepop": {"weight_low": 0.93, "weight_high": 1.08},
    "kpop": {"max_kl": 1e-5},
    "decoupled": {"weight_high": 1.05},
    "geo_mask": {"geo_low": 0.98, "geo_high": 1.02},
    "dppo": {"max_rise": 1e-4, "max_fall": 2e-4},
}
"""Options with which each acts on some of the tokens below, and not on others."""


def _cases() -> list[Case]:
    """Every loss in turn; some with a KL or an entropy term. Then every correction."""
    losses = itertools.cycle(LOSSES)
    cells = itertools.product([True, False], [1, 3], ["equal", "unequal", "one rank without"])
    terms: list[dict[str, Any]] = [{}, {"kl_coef": 0.1}, {"entropy_coef": 0.05}]
    normalizers: list[Normalize] = ["tokens", "sequences", "none"]
    plain = [
        Case(pack, calls, targets, next(losses), terms[i % 3], normalizers[i % 3], seed=i)
        for i, (pack, calls, targets) in enumerate(cells)
    ]
    losses = itertools.cycle(["grpo", "gspo", "reinforce"])
    return plain + [
        Case(
            pack=i % 2 == 0,
            calls=1,
            targets="equal",
            loss=next(losses),
            options={"correction": name, **options},
            normalize=normalizers[i % 3],
            seed=len(plain) + i,
        )
        for i, (name, options) in enumerate(CORRECTED.items())
    ]


CASES = _cases()


def _sequences(case: Case, step: int, call: int) -> list[TrainSequence]:
    seed = 100 * case.seed + 10 * step + call
    rng = random.Random(seed)
    if case.targets == "one rank without":
        sequences = random_sequences(1, seed=seed)
    elif case.targets == "unequal":
        sequences = random_sequences(2 + call, seed=seed)
        # One sequence keeps all its targets, the others one at most.
        sequences[1:] = [
            replace(s, loss_mask=[0, 1, *[0] * (len(s) - 2)][: len(s)]) for s in sequences[1:]
        ]
    else:
        length = 12
        sequences = [
            TrainSequence(
                token_ids=[rng.randrange(260) for _ in range(length)],
                loss_mask=[0] + [1] * (length - 1),
                advantages=[rng.gauss(0, 1)] * length,
                generator_logprobs=[-5.5 + rng.gauss(0, 0.1) for _ in range(length)],
            )
            for _ in range(8 + 4 * call)
        ]
    return [
        replace(
            s,
            ref_logprobs=[-5.5 + rng.gauss(0, 0.3) for _ in s.token_ids],
            old_logprobs=[-5.5 + rng.gauss(0, 0.1) for _ in s.token_ids],
            token_weights=[rng.uniform(0.5, 1.5) for _ in s.token_ids],
        )
        for s in sequences
    ]


def _config(size: int = 1, layout: ParallelConfig | None = None, **options: Any) -> TrainerConfig:
    # eps=1e-2 keeps Adam from blowing rounding noise in tiny gradients up to a full step.
    return TrainerConfig(
        num_ranks=size,
        device="cpu",
        parallel=layout or ParallelConfig(),
        optimizer=OptimizerConfig(lr=1e-2, eps=1e-2, weight_decay=0.1, max_grad_norm=0.5),
        packing=PackingConfig(max_row_tokens=48, rows_per_microbatch=2),
        collective_timeout_s=60.0,
        **options,
    )


@dataclass(frozen=True)
class Outcome:
    """What a case gave: of each step the loss sum and the norm, and tensors under HF names."""

    loss_sums: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    """Of the first step."""
    parameters: dict[str, Tensor]
    metrics: dict[str, float]
    """Of all calls."""


def _run_case(
    engine: Any, case: Case, plan: PackingPlan, read: Any
) -> tuple[list[list[EngineForwardBackward]], list[float], dict[str, Tensor], dict[str, Tensor]]:
    facts = engine.facts()
    loss = make_loss(case.loss, case.options)
    shares, norms, gradients = [], [], {}
    for step in range(STEPS):
        own = []
        for call in range(case.calls):
            sequences = _sequences(case, step, call)
            packed = pack_sequences(sequences, dp_size=facts.dp_size, plan=plan)
            own.append(engine.forward_backward(packed.batches[facts.dp_rank], loss))
        # Log-probs that are asked for in between change nothing.
        engine.forward(packed.batches[facts.dp_rank])
        if step == 0:
            gradients = read(engine, gradients=True)
        shares.append(own)
        norms.append(engine.optim_step(normalize=case.normalize).grad_norm)
    return shares, norms, gradients, read(engine, gradients=False)


def _read_local(engine: Any, *, gradients: bool) -> dict[str, Tensor]:
    parameters = dict(engine._model.named_parameters())
    return {
        name: (p.grad if gradients else p.detach()).clone().double()
        for name, p in parameters.items()
    }


def _read_titan(engine: Any, *, gradients: bool) -> dict[str, Tensor]:
    """Whole tensors under HF names: a collective. The adapter only renames and permutes."""
    tensors = {}
    for name, p in engine._model.named_parameters():
        value = p.grad if gradients else p.detach()
        tensors[name] = (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
    return dict(engine._adapter.to_hf(tensors))


def _run_on_rank(
    rank: int, layout: str, model_dir: Path, folder: Path, cases: list[Case], **options: Any
) -> Any:
    from forge_trainer.engine.titan.engine import TitanEngine

    size, parallel = LAYOUTS[layout]
    engine = TitanEngine(_config(size, parallel, **options), model_dir, World(rank, rank, size))
    engine.setup()
    initial = str(folder / f"{layout}-initial")
    engine.save(SaveRequest(initial))
    results = []
    for case in cases:
        engine.load(initial)
        plan = PackingPlan(
            48,
            2,
            pack=case.pack,
            pad_multiple=parallel.tensor,
            row_multiple=parallel.num_pipeline_microbatches,
        )
        results.append(_run_case(engine, case, plan, _read_titan))
    facts = engine.facts()
    engine.close()
    return facts, results


def _merged(answers: list[Any], index: int) -> Outcome:
    """The outcome of one case from those of all ranks."""
    facts = [facts for facts, _ in answers]
    results = [results[index] for _, results in answers]
    first = {f.dp_rank: r for f, r in zip(facts, results, strict=True) if f.has_outputs}
    shares = [result[0] for result in first.values()]
    gradients, parameters = {}, {}
    for _, norms, own_gradients, own_parameters in results:
        assert norms == results[0][1]
        gradients.update(own_gradients)
        parameters.update(own_parameters)
    return Outcome(
        loss_sums=[sum(fb.loss_sum for own in shares for fb in own[step]) for step in range(STEPS)],
        norms=results[0][1],
        gradients=gradients,
        parameters=parameters,
        metrics=_metrics(shares),
    )


def _metrics(shares: list[list[list[EngineForwardBackward]]]) -> dict[str, float]:
    """By rank, step and call, as one."""
    calls = itertools.chain.from_iterable(itertools.chain.from_iterable(shares))
    return metric_values(merge_metrics(one.metrics for one in calls))


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


def _reference(model_dir: Path, cases: list[Case]) -> tuple[list[Outcome], dict[str, Tensor]]:
    outcomes, start = [], {}
    for case in cases:
        engine = LocalEngine(_config(engine="local"), model_dir, dtype=torch.float64)
        engine.setup()
        start = _read_local(engine, gradients=False)
        plan = PackingPlan(48, 4, pack=False)
        shares, norms, gradients, parameters = _run_case(engine, case, plan, _read_local)
        loss_sums = [sum(fb.loss_sum for fb in own) for own in shares]
        outcomes.append(Outcome(loss_sums, norms, gradients, parameters, _metrics([shares])))
    return outcomes, start


@pytest.fixture(scope="module")
def reference(tiny_llama: Path) -> tuple[list[Outcome], dict[str, Tensor]]:
    return _reference(tiny_llama, CASES)


def _norm(tensors: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors.values()))


def _assert_equal(case: Case, found: Outcome, wanted: Outcome, start: dict[str, Tensor]) -> None:
    assert found.loss_sums == pytest.approx(wanted.loss_sums, rel=1e-5, abs=1e-4), case.name
    assert found.norms == pytest.approx(wanted.norms, rel=1e-5), case.name
    # The quantile is in the same bin or, where that ends, in the next one.
    p99 = "rollout/logprob_gap_p99"
    assert found.metrics.pop(p99) == pytest.approx(wanted.metrics[p99], rel=0.13), case.name
    others = {key: value for key, value in wanted.metrics.items() if key != p99}
    assert found.metrics == pytest.approx(others, rel=1e-4, abs=1e-4), case.name
    assert found.gradients.keys() == wanted.gradients.keys()
    whole = _norm(wanted.gradients)
    for name, gradient in wanted.gradients.items():
        error = float((found.gradients[name].double() - gradient).norm())
        assert error <= 1e-5 * whole, f"{case.name}: gradient of {name} is off by {error / whole}"
    change = _norm({name: p - start[name] for name, p in wanted.parameters.items()})
    rounding = torch.finfo(torch.float32).eps * _norm(wanted.parameters)
    for name, parameter in wanted.parameters.items():
        error = float((found.parameters[name].double() - parameter).norm())
        assert error <= 1e-5 * change + rounding, f"{case.name}: {name} is off by {error}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_gradient_of_one_float64_process(
    pool: RankPool,
    reference: tuple[list[Outcome], dict[str, Tensor]],
    tiny_llama: Path,
    tmp_path: Path,
    layout: str,
) -> None:
    outcomes, start = reference
    answers = pool.run(LAYOUTS[layout][0], _run_on_rank, layout, tiny_llama, tmp_path, CASES)
    for index, case in enumerate(CASES):
        _assert_equal(case, _merged(answers, index), outcomes[index], start)


@pytest.mark.parametrize("layout", ["fsdp2", "tp2"])
def test_bfloat16_is_near_float32_in_sharded_layouts(
    pool: RankPool,
    reference: tuple[list[Outcome], dict[str, Tensor]],
    tiny_llama: Path,
    tmp_path: Path,
    layout: str,
) -> None:
    """bfloat16 has 8 bits: the whole gradient within 5%, its norm and the loss within 2%."""
    run = partial(_run_on_rank, compute_dtype="bfloat16")
    answers = pool.run(LAYOUTS[layout][0], run, layout, tiny_llama, tmp_path, CASES[:1])
    found, wanted = _merged(answers, 0), reference[0][0]
    assert found.loss_sums == pytest.approx(wanted.loss_sums, rel=0.02, abs=0.5)
    assert found.norms == pytest.approx(wanted.norms, rel=0.02)
    assert found.norms != pytest.approx(wanted.norms, rel=1e-5)
    assert {gradient.dtype for gradient in found.gradients.values()} == {torch.float32}
    errors = {n: found.gradients[n].double() - g for n, g in wanted.gradients.items()}
    assert _norm(errors) <= 0.05 * _norm(wanted.gradients)


def test_every_loss_is_in_the_matrix() -> None:
    assert {case.loss for case in CASES} == set(LOSSES)


def test_every_correction_is_in_the_matrix_and_acts(
    reference: tuple[list[Outcome], dict[str, Tensor]],
) -> None:
    pairs = list(zip(CASES, reference[0], strict=True))
    shares = {
        case.options["correction"]: outcome.metrics["loss/corrected"]
        for case, outcome in pairs
        if "correction" in case.options
    }
    assert shares.keys() == CORRECTIONS.keys()
    assert all(0.02 < share < 0.98 for share in shares.values()), shares


@pytest.mark.parametrize("layout", ["fsdp2", "hsdp", "tp2", "fsdp2_tp2"])
def test_tied_embeddings_have_the_gradient_of_one_float64_process(
    pool: RankPool, tiny_qwen3: Path, tmp_path: Path, layout: str
) -> None:
    cases = CASES[3:5]
    outcomes, start = _reference(tiny_qwen3, cases)
    answers = pool.run(LAYOUTS[layout][0], _run_on_rank, layout, tiny_qwen3, tmp_path, cases)
    for index, case in enumerate(cases):
        found = _merged(answers, index)
        for tensors in (found.gradients, found.parameters):
            tensors.pop("lm_head.weight", None)
        _assert_equal(case, found, outcomes[index], start)


def _train_and_save(rank: int, layout: str, model_dir: Path, path: str | None, saved: str) -> Any:
    """Two steps, or what `path` holds; then a third step. Norms, parameters, step."""
    from forge_trainer.engine.titan.engine import TitanEngine

    size, parallel = LAYOUTS[layout]
    engine = TitanEngine(_config(size, parallel), model_dir, World(rank, rank, size))
    engine.setup()
    facts = engine.facts()
    plan = PackingPlan(48, 2, pad_multiple=parallel.tensor, row_multiple=parallel.pipeline)

    def step(seed: int) -> float:
        packed = pack_sequences(random_sequences(seed=seed), dp_size=facts.dp_size, plan=plan)
        engine.forward_backward(packed.batches[facts.dp_rank], make_loss("grpo"))
        return engine.optim_step().grad_norm

    if path is None:
        step(0)
        step(1)
        engine.save(SaveRequest(saved))
    else:
        assert engine.load(path).step == 2
    norm = step(2)
    return norm, engine.step, _read_titan(engine, gradients=False)


@pytest.fixture(scope="module")
def llama_9_3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """9 attention and 3 key-value heads: a shard boundary runs through a head."""
    tiny = TinyModelConfig(
        architecture="llama",
        hidden_size=72,
        intermediate_size=96,
        num_layers=2,
        num_heads=9,
        num_kv_heads=3,
        head_dim=8,
        max_sequence_tokens=64,
        tie_embeddings=False,
    )
    return create_tiny_model(tmp_path_factory.mktemp("llama93"), tiny, seed=0)


@pytest.mark.parametrize(
    ("model", "saver", "loaders"),
    [
        ("tiny_llama", "fsdp2", ["fsdp2", "one", "tp2", "pp2", "hsdp"]),
        ("tiny_llama", "fsdp2_tp2", ["fsdp2_pp2", "fsdp2"]),
        ("llama_9_3", "fsdp2", ["one", "pp2"]),
    ],
    ids=["fsdp2", "fsdp2_tp2", "9 and 3 heads"],
)
def test_a_checkpoint_loads_into_another_layout(
    pool: RankPool,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    model: str,
    saver: str,
    loaders: list[str],
) -> None:
    """Weights, optimizer and step: the next update is the one of the layout that saved.

    Bit for bit where the layout is the same.
    """
    model_dir, saved = request.getfixturevalue(model), str(tmp_path / "saved")
    wanted = pool.run(LAYOUTS[saver][0], _train_and_save, saver, model_dir, None, saved)[0]
    for loader in loaders:
        found = pool.run(LAYOUTS[loader][0], _train_and_save, loader, model_dir, saved, saved)
        tensors: dict[str, Tensor] = {}
        for norm, step, own in found:
            assert norm == pytest.approx(wanted[0], rel=1e-5)
            assert step == wanted[1] == 3
            tensors.update(own)
        assert tensors.keys() == wanted[2].keys()
        for name, tensor in tensors.items():
            torch.testing.assert_close(tensor, wanted[2][name], rtol=1e-5, atol=1e-6)
        if loader == saver:
            assert found[0][0] == wanted[0]
            assert all(torch.equal(tensors[name], tensor) for name, tensor in wanted[2].items())


def _export(rank: int, layout: str, model_dir: Path, path: str) -> dict[str, Tensor]:
    from forge_trainer.engine.titan.engine import TitanEngine

    size, parallel = LAYOUTS[layout]
    engine = TitanEngine(_config(size, parallel), model_dir, World(rank, rank, size))
    engine.setup()
    engine.save(SaveRequest(path, format="hf"))
    return _read_titan(engine, gradients=False)


@pytest.mark.parametrize(
    ("model", "layout"),
    [("llama_9_3", "fsdp2"), ("tiny_llama", "fsdp2_pp2"), ("tiny_qwen3", "fsdp2_tp2")],
)
def test_an_export_of_any_layout_is_the_directory_it_came_from(
    pool: RankPool, request: pytest.FixtureRequest, tmp_path: Path, model: str, layout: str
) -> None:
    model_dir, path = request.getfixturevalue(model), tmp_path / "hf"
    pool.run(LAYOUTS[layout][0], _export, layout, model_dir, str(path))
    found, wanted = load_weights(path), load_weights(model_dir)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    load_causal_lm(path, dtype=torch.float32, device=torch.device("cpu"))
    assert (path / "tokenizer.json").is_file()
