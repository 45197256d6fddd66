"""Requests in vLLM's words, and what it answers in ours."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from vllm import RequestOutput, SamplingParams
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind

from forge_trainer.errors import EngineError
from forge_trainer.types import Completion, GenerationRequest
from forge_trainer.types.arrays import as_array
from forge_trainer.types.messages import StopReason

from .greedy import KEY


def sampling_params(request: GenerationRequest, stop_token_ids: Collection[int]) -> SamplingParams:
    """How vLLM is to sample a request; nothing is truncated or penalised."""
    wanted = request.sampling
    return SamplingParams(
        temperature=0.0 if wanted.greedy else wanted.temperature,
        extra_args={KEY: wanted.temperature} if wanted.greedy else None,
        seed=request.seed,
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
