"""Where the model comes from."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from .section import Section


class TinyModelConfig(Section):
    """A model made on the fly with random weights, for runs without a download."""

    architecture: Literal["qwen3", "llama"] = "qwen3"
    hidden_size: PositiveInt = 128
    intermediate_size: PositiveInt = 512
    num_layers: PositiveInt = 4
    num_heads: PositiveInt = 4
    num_kv_heads: PositiveInt = 4
    head_dim: Annotated[int, Field(gt=0, multiple_of=2)] = 32
    max_sequence_tokens: PositiveInt = 256
    tie_embeddings: bool = True

    @model_validator(mode="after")
    def kv_heads_divide_heads(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}"
            )
        return self

    @model_validator(mode="after")
    def llama_heads_span_the_hidden_size(self) -> Self:
        if self.architecture == "llama" and self.num_heads * self.head_dim != self.hidden_size:
            raise ValueError(
                f"llama needs num_heads * head_dim = hidden_size, got "
                f"{self.num_heads} * {self.head_dim} and {self.hidden_size}"
            )
        return self


class ModelConfig(Section):
    """Exactly one of `path` and `tiny`."""

    path: str | None = None
    """A Hugging Face directory or hub id."""
    tiny: TinyModelConfig | None = None
    """Make a tiny model and a byte-level tokenizer in the run folder instead."""

    @model_validator(mode="after")
    def path_or_tiny(self) -> Self:
        if (self.path is None) == (self.tiny is None):
            given = "both" if self.path else "neither"
            raise ValueError(f"give exactly one of path and tiny, got {given}")
        return self
