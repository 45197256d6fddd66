"""How much arithmetic a training step is, and how much a device could do."""

from __future__ import annotations

from collections.abc import Sequence

PEAK_FLOPS = (
    ("B200", {"bfloat16": 2250e12, "float32": 75e12}),
    ("H200", {"bfloat16": 989e12, "float32": 67e12}),
    ("H100 PCIe", {"bfloat16": 756e12, "float32": 51e12}),
    ("H100", {"bfloat16": 989e12, "float32": 67e12}),
    ("A100", {"bfloat16": 312e12, "float32": 19.5e12}),
    ("L40S", {"bfloat16": 362e12, "float32": 91.6e12}),
    ("L4", {"bfloat16": 121e12, "float32": 30.3e12}),
)
"""Part of a device's name -> dense floating-point operations per second, from NVIDIA's data sheets;
the first that matches counts. float32 is without TF32, as torch computes by default."""


def device_peak_flops(device_name: str, compute_dtype: str) -> float | None:
    """What the device can do at most; None if that is not known."""
    for part, peaks in PEAK_FLOPS:
        if part in device_name:
            return peaks.get(compute_dtype)
    return None


def training_flops(
    lengths: Sequence[int], *, num_matmul_parameters: int, num_layers: int, attention_width: int
) -> float:
    """Operations of a forward and backward pass over documents of these lengths.

    6 N per token, and 12 L (H Q) T for attention over a document of T tokens, where N are the
    parameters that multiply (embeddings that are only looked up do not), L layers and H Q the heads
    times their size. Source: Chowdhery et al. (2022), PaLM, arXiv:2204.02311, appendix B.

    Example: one document of 10 tokens, N = 100, L = 2, H Q = 8
        -> 6 * 100 * 10 + 12 * 2 * 8 * 10 * 10 = 25,200
    """
    tokens = sum(lengths)
    pairs = sum(length * length for length in lengths)
    return 6.0 * num_matmul_parameters * tokens + 12.0 * num_layers * attention_width * pairs
