"""How vLLM gets weights: its own hook for weight transfer, over the staging copy.

Importing this registers the engine, in whatever process a worker of vLLM runs. What arrives was
fetched and verified before; here it is only put where vLLM wants it. Three things vLLM 0.32.0
leaves to the caller: an output layer that is tied to the embedding is packed again here; prefix
caches and the caches of running requests are the backend's work.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from .staging import StagingAddress

NAME = "forge_trainer"


@dataclass
class InitInfo(WeightTransferInitInfo):
    staging: StagingAddress


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Nothing: the staging copy holds it."""


class StagedWeights(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads a whole model from the staging copy, in each of vLLM's workers."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        # It warns at every update of layers that have no weights of their own; what is missing is
        # found out here.
        logging.getLogger(initialize_layerwise_reload.__module__).setLevel(logging.ERROR)
        self._staged: dict[str, Tensor] = init_info.staging.map()

    def start_weight_update(self) -> None:
        """Nothing: layers are taken apart in `receive_weights`, which puts them together again."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load them all.

        Raises: whatever fails half way; the model then is a mix of two versions that runs, and
        another whole update makes it right.
        """
        initialize_layerwise_reload(self.model)
        try:
            loaded = self.model.load_weights(iter(self._staged.items()))
        finally:
            # Layers that were not reached would stay on the meta device, and no step would run.
            finalize_layerwise_reload(self.model, self.model_config)
        self._require_all(loaded)
        for head in self._output_layers():
            # A tied one shares the new weight, but on the CPU it computes with a packed copy.
            head.quant_method.process_weights_after_loading(head)

    def _require_all(self, loaded: set[str]) -> None:
        """Raises RuntimeError for parameters that none of the names led to: they are stale.

        A tied one is named once.
        """
        missing = {name for name, _ in self.model.named_parameters()} - loaded
        if missing:
            raise RuntimeError(f"vLLM found no weights for {sorted(missing)[:3]}")

    def _output_layers(self) -> list[Any]:
        return [layer for layer in self.model.modules() if isinstance(layer, ParallelLMHead)]

    def finish_weight_update(self) -> None: ...

    def shutdown(self) -> None:
        self._staged = {}


class Worker:
    """Named to vLLM as the extension of its workers, so that each of them imports this module."""


WeightTransferEngineFactory.register_engine(NAME, StagedWeights)
