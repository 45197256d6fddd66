"""What the engine costs: a training step against the same packed rows in a plain PyTorch loop."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from apps.bench.measure import Measure, Row, Spread, interleaved, ratios
from forge_trainer.config import OptimizerConfig, TinyModelConfig, TrainerConfig
from forge_trainer.engine import find_engine
from forge_trainer.functional.losses.objective import make_loss
from forge_trainer.functional.packing import PackedRows, PackingPlan, pack_sequences
from forge_trainer.hf import create_tiny_model, load_causal_lm
from forge_trainer.types import TrainBatch, TrainSequence, World

ROUNDS = 25
SEQUENCES, TOKENS = 256, 5
"""Of a step of configs/grpo_tiny.yaml: 256 prompts of four tokens, each with a digit."""
PLAN = PackingPlan(max_row_tokens=64, rows_per_microbatch=16)
TINY = TinyModelConfig(
    hidden_size=192, intermediate_size=768, num_layers=2, num_heads=6, num_kv_heads=6
)
OPTIMIZER = OptimizerConfig(lr=1e-4)
PROFILES = 7
PARTS = {
    "products": "matrix products",
    "attention": "attention",
    "fsdp": "FSDP's hooks, which also run with one rank",
    "optimizer": "AdamW",
    "packing": "making tensors of a rank's rows",
    "rest": "norms, activations, log-probs, the loss, metrics",
}


async def run() -> list[Row]:
    """One rank, one thread, float32. Both sides begin with what a rank is sent."""
    torch.set_num_threads(1)
    packed = pack_sequences(_sequences(), dp_size=1, plan=PLAN).ranks[0]
    with tempfile.TemporaryDirectory() as scratch:
        model_dir = create_tiny_model(Path(scratch) / "model", TINY, seed=0)
        engine = find_engine("titan")(
            TrainerConfig(device="cpu", optimizer=OPTIMIZER), model_dir, World()
        )
        engine.setup()
        plain = _plain_loop(model_dir)
        pairs = await interleaved(
            _timed(lambda: _engine_step(engine, packed)),
            _timed(lambda: plain(packed)),
            rounds=ROUNDS,
            warmup=5,
        )
        shares = [_shares(engine, packed) for _ in range(PROFILES)]
        engine.close()
    plain_s = sorted(seconds for _, seconds in pairs)[len(pairs) // 2]
    what = f"forward, backward and update, {packed.shape} rows ({plain_s * 1000:.0f} ms)"
    return [
        Row("engine_over_plain_torch", what, ratios(pairs), bar=1.15),
        *(
            Row(f"share_{name}", f"of a step: {part}", Spread.of([one[name] for one in shares]))
            for name, part in PARTS.items()
        ),
    ]


def _shares(engine: Any, packed: PackedRows) -> dict[str, float]:
    """Of the CPU time of one profiled step, by part."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        with torch.profiler.record_function("packing"):
            batches = packed.batches()
        engine.forward_backward(batches, make_loss("grpo"))
        engine.optim_step()
    events = profiler.key_averages()
    total = sum(event.self_cpu_time_total for event in events)

    def of(*names: str, whole: bool = False) -> float:
        chosen = [event for event in events if event.key.startswith(names)]
        spent = sum(e.cpu_time_total if whole else e.self_cpu_time_total for e in chosen)
        return float(spent / total)

    shares = {
        "products": of("aten::mm", "aten::addmm", "aten::bmm"),
        "attention": of("aten::_scaled_dot_product", "aten::_flash_attention"),
        "fsdp": of("FSDP::pre_", "FSDP::post_", "FSDP::root_", whole=True),
        "optimizer": of("Optimizer.step", whole=True),
        "packing": of("packing", whole=True),
    }
    return {**shares, "rest": 1.0 - sum(shares.values())}


def _sequences() -> list[TrainSequence]:
    rng = np.random.default_rng(0)
    mask = np.arange(TOKENS) == TOKENS - 1
    return [
        TrainSequence(
            token_ids=rng.integers(4, 200, TOKENS, np.int32),
            loss_mask=mask,
            advantages=rng.standard_normal(TOKENS, np.float32),
            generator_logprobs=np.full(TOKENS, -5.3, np.float32),
            token_weights=np.ones(TOKENS, np.float32),
        )
        for _ in range(SEQUENCES)
    ]


def _engine_step(engine: Any, packed: PackedRows) -> None:
    engine.forward_backward(packed.batches(), make_loss("grpo"))
    engine.optim_step()


def _plain_loop(model_dir: Path) -> Callable[[PackedRows], None]:
    """The same model of transformers, the same loss, clipping and AdamW, nothing else."""
    model: Any = load_causal_lm(model_dir, dtype=torch.float32, device=torch.device("cpu"))
    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=OPTIMIZER.lr, betas=OPTIMIZER.betas, weight_decay=0.0, foreach=True
    )

    def step(packed: PackedRows) -> None:
        batches = packed.batches()
        num_targets = sum(int(batch.loss_mask_BT.sum()) for batch in batches)
        for batch in batches:
            loss: Any = _clipped_loss(model, batch) / num_targets
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _clipped_loss(model: Any, batch: TrainBatch) -> torch.Tensor:
    documents_BT = batch.document_ids_BT
    T = documents_BT.shape[1]
    may_attend = torch.ones(T, T, dtype=torch.bool).tril()
    same = documents_BT[:, None, :, None] == documents_BT[:, None, None, :]
    logits_BTV = model(
        input_ids=batch.token_ids_BT,
        attention_mask=same & may_attend,
        position_ids=batch.positions_BT,
        use_cache=False,
    ).logits
    targets_BT = batch.token_ids_BT[:, 1:]
    logprobs_BT = -F.cross_entropy(logits_BTV[:, :-1].transpose(1, 2), targets_BT, reduction="none")
    assert batch.generator_logprobs_BT is not None
    assert batch.advantages_BT is not None
    ratio_BT = (logprobs_BT - batch.generator_logprobs_BT[:, 1:]).exp()
    advantages_BT = batch.advantages_BT[:, 1:]
    surrogate_BT = torch.minimum(ratio_BT * advantages_BT, ratio_BT.clamp(0.8, 1.2) * advantages_BT)
    return -(surrogate_BT * batch.loss_mask_BT[:, 1:]).sum()


def _timed(step: Callable[[], None]) -> Measure:
    async def measure() -> float:
        start = time.perf_counter()
        step()
        return time.perf_counter() - start

    return measure
