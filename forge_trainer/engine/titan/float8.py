"""Float8 products in the linear layers, through TorchTitan's converter and torchao."""

from __future__ import annotations

from typing import Any

from torchtitan.components.quantization import Float8LinearConverter

from forge_trainer.config import TrainerConfig

NOT_CONVERTED = ["lm_head"]
"""Its product is computed in chunks by `functional.logprobs`."""


def convert_to_float8(model_config: Any, config: TrainerConfig) -> Any:
    """The model's config with float8 linear layers."""
    emulate = config.float8 == "emulated"
    converter = Float8LinearConverter.Config(
        recipe_name="rowwise" if emulate else config.float8,
        filter_fqns=NOT_CONVERTED,
        emulate=emulate,
        model_compile_enabled="model" in config.compile,
    )
    return Float8LinearConverter(converter).convert(model_config)
