"""Where an engine's tensors live: on its device, or on the host while others use the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from forge_trainer.errors import EngineError


class Residence:
    """Moves parameters, gradients, buffers and optimizer state, without changing a value."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], home: torch.device):
        self._model = model
        self._optimizers = optimizers
        self._home = home
        self._is_home = True

    def move(self, device: str) -> None:
        """To "cpu", or back to the device that the engine runs on.

        Raises:
            EngineError: it is neither.
        """
        wanted = torch.device(device)
        if wanted.type not in ("cpu", self._home.type):
            raise EngineError(f"cannot move to {device}: this trainer runs on {self._home}")
        is_home = wanted.type == self._home.type
        target = self._home if is_home else wanted
        self._model.to(target)
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                for name, value in state.items():
                    # Some optimizers keep their step on the CPU; it is one number.
                    if isinstance(value, Tensor) and name != "step":
                        state[name] = value.to(target)
        self._is_home = is_home
        if not is_home:
            torch.get_device_module(self._home).empty_cache()

    def require_home(self) -> None:
        """Raises EngineError while the tensors are away."""
        if not self._is_home:
            raise EngineError(
                f"the trainer's state is on the CPU; call to({self._home.type!r}) first"
            )
