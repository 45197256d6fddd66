"""Log-probs of greedy tokens at the request's temperature.

vLLM says "greedy" by a temperature of 0, and reports such tokens' log-probs at 1.
"""

from __future__ import annotations

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

KEY = "greedy_temperature"
"""In SamplingParams.extra_args."""


class GreedyTemperature(LogitsProcessor):
    """Divides a greedy request's logits by its temperature, which vLLM then leaves as they are.

    For the V1 model runner; V2 has another interface.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._temperatures: dict[int, float] = {}

    def is_argmax_invariant(self) -> bool:
        # It is, but those that say so are left out of batches in which all are greedy.
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(
            self._temperatures, batch_update, lambda params, prompt, output: _temperature(params)
        )

    def apply(self, logits: Tensor) -> Tensor:
        if self._temperatures:
            rows = torch.tensor(list(self._temperatures), device=logits.device)
            divisors = torch.tensor(list(self._temperatures.values()), device=logits.device)
            logits[rows] /= divisors[:, None]
        return logits


def _temperature(params: SamplingParams) -> float | None:
    temperature: float | None = (params.extra_args or {}).get(KEY)
    return temperature
