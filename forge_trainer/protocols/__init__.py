"""The seams of the project. Read this package first.

A controller talks to a `Trainer` and to `Generator`s. A trainer is a group of ranks; each rank
drives one `Engine` and publishes through one `WeightStore`. Anything that keeps a protocol can
take the place of what ships: another engine, another transport, another generator.
"""

from .engine import Engine
from .environment import Environment
from .generator import Generator
from .trainer import Trainer
from .weights import ArrivedWeights, WeightsReading, WeightStore

__all__ = [
    "ArrivedWeights",
    "Engine",
    "Environment",
    "Generator",
    "Trainer",
    "WeightStore",
    "WeightsReading",
]
