"""Requests in vLLM's words, and what it answers in ours."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from vllm import RequestOutput
from vllm import SamplingParams as VllmSamplingParams
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind

from forge_trainer.errors import DataError, EngineError
from forge_trainer.types import Completion, GenerationRequest, SamplingParams
from forge_trainer.types.arrays import as_array
from forge_trainer.types.messages import StopReason

from .greedy import KEY
from .support import TEMPERATURES


def require_temperature(sampling: SamplingParams, *, runner_v2: bool) -> None:
    """Raises DataError where vLLM would give log-probs at another temperature."""
    temperature = sampling.temperature
    if not sampling.greedy and not TEMPERATURES[0] <= temperature <= TEMPERATURES[1]:
        raise DataError(
            f"temperature={temperature}: vLLM samples at {TEMPERATURES[0]} to {TEMPERATURES[1]}; "
            "take one of these, greedy, or backend: transformers"
        )
    if sampling.greedy and temperature != 1 and runner_v2:
        raise DataError(
            f"greedy at temperature={temperature}: vLLM's model runner V2 gives log-probs of "
            "greedy tokens at temperature 1 only; set temperature to 1, or "
            "VLLM_USE_V2_MODEL_RUNNER=0"
        )


def vllm_params(request: GenerationRequest, stop_token_ids: Collection[int]) -> VllmSamplingParams:
    """How vLLM is to sample a request; nothing is truncated or penalised."""
    wanted = request.sampling
    return VllmSamplingParams(
        temperature=0.0 if wanted.greedy else wanted.temperature,
        extra_args={KEY: wanted.temperature} if wanted.greedy else None,
        # -1 would be none, and torch takes 64 bits.
        seed=request.seed % 2**63,
        max_tokens=wanted.max_completion_tokens,
        stop=list(wanted.stop),
        stop_token_ids=list(stop_token_ids),
        # Of the sampled token alone.
        logprobs=0,
        flat_logprobs=True,
        # Text is needed while sampling only to find stop strings in it.
        detokenize=bool(wanted.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def completion_of(
    request: GenerationRequest, output: RequestOutput, decoded: str | None
) -> Completion:
    """What vLLM answered; `decoded` is its text where vLLM had no need of it.

    Raises:
        EngineError: log-probs are not finite, or it ended otherwise than we know.
    """
    (found,) = output.outputs
    logprobs = _logprobs(found)
    if not np.isfinite(logprobs).all():
        raise EngineError("the model's logits are not finite; look at its weights")
    return Completion(
        # Equal prompts may share an array, which then is pickled once.
        prompt_token_ids=as_array(request.token_ids).astype(np.int32, copy=False),
        token_ids=np.array(found.token_ids, np.int32),
        logprobs=logprobs,
        policy_versions=_policy_versions(found),
        text=found.text if decoded is None else decoded,
        temperature=request.sampling.temperature,
        stop_reason=_stop_reason(found),
    )


def _logprobs(found: CompletionOutput) -> np.ndarray:
    """Of the sampled tokens. vLLM names them first at every position."""
    logprobs = found.logprobs
    assert isinstance(logprobs, FlatLogprobs), "asked for"
    return np.array(logprobs.logprobs, np.float32)[np.array(logprobs.start_indices, np.int64)]


def _policy_versions(found: CompletionOutput) -> np.ndarray:
    """Of every token; `set_weight_version` named each version by its policy version."""
    spans = found.weight_versions
    assert spans is not None, "named by `load`"
    versions = np.array([int(span.version) for span in spans], np.int32)
    return np.repeat(versions, [span.end - span.start for span in spans])


def _stop_reason(found: CompletionOutput) -> StopReason:
    if found.finish_reason not in ("stop", "length"):
        raise EngineError(f"vLLM ended a completion with {found.finish_reason!r}")
    return "stop" if found.finish_reason == "stop" else "length"
