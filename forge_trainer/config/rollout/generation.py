"""What completes prompts."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from ..section import Seconds, Section, Seed
from .vllm import VllmConfig

CUTS_OFF_TOKENS = (
    "completions would come from a part of the vocabulary, whose probabilities are scaled up, "
    "while the trainer's are those of the whole, so every importance ratio would be wrong by the "
    "part's share; leave it out, and use temperature, which both sides know"
)
REFUSED_SAMPLING = dict.fromkeys(("top_p", "top_k", "min_p"), CUTS_OFF_TOKENS)
"""What others sample with and we do not, and why."""

StopString = Annotated[str, Field(min_length=1)]


class GeneratorConfig(Section):
    refused: ClassVar[dict[str, str]] = REFUSED_SAMPLING
    backend: Literal["transformers", "vllm"] = "transformers"
    """What samples. vllm is an optional extra, see docs/generators.md."""
    replicas: PositiveInt = 1
    """Generators that share the requests."""
    tensor_parallel: PositiveInt = 1
    """GPUs of one generator; with vllm only."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["float32", "bfloat16"] | None = None
    """What it runs in; None takes weights.dtype, and nothing else can be pulled."""
    max_prompt_tokens: PositiveInt = 128
    max_completion_tokens: PositiveInt = 16
    temperature: Annotated[float, Field(ge=1e-3, le=1e6)] = 1.0
    stop: tuple[StopString, ...] = ()
    """Strings that end a completion. Their tokens belong to it; its text ends before them."""
    seed: Seed | None = None
    """Of sampling; None takes run.seed."""
    batch_size: PositiveInt = 256
    """Slots: completions sampled at one time. One that ends makes room for the next."""
    update: Literal["drain", "in_flight"] = "drain"
    """What happens to requests that run when new weights have arrived: they are finished first with
    the old ones; or they go on with the new ones from the next token."""
    kv_cache: Literal["recompute", "keep"] = "recompute"
    """Keys and values of requests that run at an in-flight update: computed again with the new
    weights; or kept, an approximation that no trainer can reproduce."""
    request_timeout_s: Seconds = 600.0
    """A request that takes longer: its generator counts as hung."""
    cpu_threads: PositiveInt | None = None
    """Threads of its computations on the CPU; None is a fair share of the host's cores."""
    vllm: VllmConfig = VllmConfig()

    @model_validator(mode="after")
    def kept_caches_belong_to_updates_in_flight(self) -> Self:
        if self.kv_cache == "keep" and self.update != "in_flight":
            raise ValueError(
                "kv_cache: keep, but update is drain, so nothing runs while weights change; set "
                "update: in_flight or leave kv_cache out"
            )
        return self

    @model_validator(mode="after")
    def tensor_parallel_needs_vllm_on_gpus(self) -> Self:
        if self.tensor_parallel > 1 and (self.backend != "vllm" or self.device == "cpu"):
            raise ValueError(
                f"tensor_parallel: {self.tensor_parallel}, but backend is {self.backend} on device "
                f"{self.device}; it needs backend: vllm and GPUs"
            )
        return self

    @model_validator(mode="after")
    def settings_of_vllm_belong_to_it(self) -> Self:
        if self.backend != "vllm" and self.vllm != VllmConfig():
            raise ValueError(
                f"vllm: is given, but backend is {self.backend}; set backend: vllm or leave it out"
            )
        return self
