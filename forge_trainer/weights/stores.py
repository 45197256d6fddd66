"""Which store is behind an address: the place to add a transport."""

from __future__ import annotations

from pathlib import Path

from forge_trainer.config import WeightsConfig
from forge_trainer.pieces import StoreAddress
from forge_trainer.protocols import WeightStore


def open_store(address: StoreAddress, config: WeightsConfig) -> WeightStore:
    """This process's access to a store that runs already.

    Raises:
        WeightsError: it is gone.
    """
    if address.transport == "shared_memory":
        from forge_trainer.weights.shared_memory.store import SharedMemoryWeightStore

        return SharedMemoryWeightStore(Path(address.location), config.verify)
    if address.transport == "torchstore":
        from forge_trainer.weights.torchstore.store import TorchStoreWeightStore

        return TorchStoreWeightStore(
            address.location, config.verify, lease_timeout_s=config.lease_timeout_s
        )
    from .memory import MemoryWeightStore

    return MemoryWeightStore(config.verify)
