"""Chunked log-probs against materialised logits: memory and time of forward and backward."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import Tensor

from apps.bench.measure import Row, interleaved, ratios
from forge_trainer.functional.logprobs import LogprobOptions, selected_logprobs

TOKENS, VOCABULARY, HIDDEN = 2048, 32768, 256
CHUNK_TOKENS = 256
ROUNDS = 7


async def run() -> list[Row]:
    """Ratios at T=2048, V=32768, H=256 in float32, on one CPU thread."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    hidden = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(VOCABULARY, HIDDEN) / HIDDEN**0.5)
    targets = torch.randint(VOCABULARY, (TOKENS,))
    _require_equal(hidden, weight, targets)
    memory = [
        (
            await _peak(_chunked, hidden, weight, targets),
            await _peak(_materialised, hidden, weight, targets),
        )
        for _ in range(ROUNDS)
    ]

    async def chunked() -> float:
        return _seconds(_chunked, hidden, weight, targets)

    async def materialised() -> float:
        return _seconds(_materialised, hidden, weight, targets)

    times = await interleaved(chunked, materialised, rounds=ROUNDS, warmup=1)
    return [
        Row(
            "peak_memory_over_materialised",
            "extra peak memory, chunked / materialised",
            ratios(memory),
            bar=0.25,
        ),
        Row(
            "time_over_materialised",
            "forward and backward, chunked / materialised",
            ratios(times),
            bar=1.4,
        ),
    ]


def _chunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    options = LogprobOptions(chunk_tokens=CHUNK_TOKENS)
    logprobs, _ = selected_logprobs(hidden, weight, targets, torch.ones(len(targets)), options)
    return logprobs


def _materialised(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    log_p = torch.log_softmax(hidden @ weight.T, dim=-1)
    return log_p.gather(-1, targets[:, None]).squeeze(-1)


def _require_equal(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    results = []
    for function in (_chunked, _materialised):
        logprobs = function(hidden, weight, targets)
        results.append((logprobs, *torch.autograd.grad(logprobs.sum(), (hidden, weight))))
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def _seconds(function: object, *inputs: Tensor) -> float:
    start = time.perf_counter()
    _forward_backward(function, *inputs)
    return time.perf_counter() - start


async def _peak(function: object, *inputs: Tensor) -> float:
    """Bytes of resident memory at the peak beyond those before."""
    _forward_backward(function, *inputs)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
    before = _resident("VmRSS")
    _forward_backward(function, *inputs)
    return max(_resident("VmHWM") - before, 1)


def _forward_backward(function: object, hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    assert callable(function)
    torch.autograd.grad(function(hidden, weight, targets).sum(), (hidden, weight))


def _resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise ValueError(f"no {field} in /proc/self/status")
