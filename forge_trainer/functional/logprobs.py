"""Log-probs of given tokens from hidden states, without ever holding [N, V] logits.

The vocabulary axis stays in this file: the rest of the project sees one number per token. The
forward pass keeps only the log-sum-exp of each token; the backward pass recomputes the logits
of one chunk of tokens at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

DEFAULT_CHUNK_TOKENS = 1024


def selected_logprobs(
    hidden_NH: Float[Tensor, "N H"],
    weight_VH: Float[Tensor, "V H"],
    targets_N: Int[Tensor, " N"],
    temperatures_N: Float[Tensor, " N"],
    *,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    with_entropy: bool = False,
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"] | None]:
    """log softmax(hidden @ weight.T / temperature) at each target, and the entropy if asked for.

    Both are in nats, float32 (float64 for float64 inputs), and differentiable with respect to
    hidden states and weight. Peak extra memory is chunk_tokens * V numbers.

    Example:
        hidden [[1, 0]], weight [[1, 0], [0, 1]], target 0, temperature 1
        -> logits [1, 0] -> log-prob 1 - log(e + 1) = -0.3133
    """
    return _SelectedLogprobs.apply(  # type: ignore[no-untyped-call, no-any-return]
        hidden_NH, weight_VH, targets_N, temperatures_N, chunk_tokens, with_entropy
    )


def token_logprobs(
    hidden_BTH: Float[Tensor, "B T H"],
    weight_VH: Float[Tensor, "V H"],
    token_ids_BT: Int[Tensor, "B T"],
    document_ids_BT: Int[Tensor, "B T"],
    temperatures_BT: Float[Tensor, "B T"],
    *,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    with_entropy: bool = False,
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"] | None]:
    """The log-prob of every token given those before it in its document, at that token's index.

    Token t is predicted from hidden state t-1; this shift is done here and nowhere else. The
    first token of a document, and padding, get 0.0.
    """
    B, T, H = hidden_BTH.shape
    logprobs_N, entropies_N = selected_logprobs(
        hidden_BTH[:, :-1].reshape(-1, H),
        weight_VH,
        token_ids_BT[:, 1:].reshape(-1),
        temperatures_BT[:, 1:].reshape(-1),
        chunk_tokens=chunk_tokens,
        with_entropy=with_entropy,
    )
    predicted_BT = has_prediction(document_ids_BT)[:, 1:]
    logprobs_BT = _at_targets(logprobs_N.view(B, T - 1), predicted_BT)
    if entropies_N is None:
        return logprobs_BT, None
    return logprobs_BT, _at_targets(entropies_N.view(B, T - 1), predicted_BT)


def has_prediction(document_ids_BT: Int[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
    """True where a token follows another one of the same document."""
    same = document_ids_BT[:, 1:] == document_ids_BT[:, :-1]
    real = document_ids_BT[:, 1:] >= 0
    return torch.nn.functional.pad(same & real, (1, 0), value=False)


def _at_targets(values: Tensor, predicted: Tensor) -> Tensor:
    kept = torch.where(predicted, values, torch.zeros_like(values))
    return torch.nn.functional.pad(kept, (1, 0))


class _SelectedLogprobs(torch.autograd.Function):
    """Two-pass log-softmax-and-gather, chunked over tokens.

    With z the logits divided by the temperature, p = softmax(z), L = log-sum-exp(z):
        log-prob of target y:  z_y - L            d/dz_j = [j = y] - p_j
        entropy:  S = L - sum_j p_j z_j           d/dz_j = -p_j (z_j - L + S)
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperatures: Tensor,
        chunk_tokens: int,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        logprobs, lse, entropies = [], [], []
        for rows in _chunks(hidden.shape[0], chunk_tokens):
            z = _scaled_logits(hidden[rows], weight, temperatures[rows])
            chunk_lse = torch.logsumexp(z, dim=-1)
            logprobs.append(z.gather(-1, targets[rows, None]).squeeze(-1) - chunk_lse)
            lse.append(chunk_lse)
            if with_entropy:
                p = torch.exp(z - chunk_lse[:, None])
                entropies.append(chunk_lse - (p * z).sum(-1))
        entropy_N = torch.cat(entropies) if with_entropy else None
        ctx.save_for_backward(hidden, weight, targets, temperatures, torch.cat(lse), entropy_N)
        ctx.chunk_tokens = chunk_tokens
        return torch.cat(logprobs), entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_logprobs, grad_entropy = grads
        hidden, weight, targets, temperatures, lse, entropy = ctx.saved_tensors
        wide = lse.dtype
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        for rows in _chunks(hidden.shape[0], ctx.chunk_tokens):
            z = _scaled_logits(hidden[rows], weight, temperatures[rows])
            log_p = z - lse[rows, None]
            p = torch.exp(log_p)
            grad_z = torch.zeros_like(p)
            if grad_logprobs is not None:
                upstream = grad_logprobs[rows, None].to(wide)
                grad_z -= p * upstream
                grad_z.scatter_add_(-1, targets[rows, None], upstream)
            if grad_entropy is not None and entropy is not None:
                upstream = grad_entropy[rows, None].to(wide)
                grad_z -= upstream * p * (log_p + entropy[rows, None])
            grad_logits = (grad_z / temperatures[rows, None].to(wide)).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = grad_logits @ weight
            if grad_weight is not None:
                grad_weight += (grad_logits.T @ hidden[rows]).to(wide)
        narrow = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, narrow, None, None, None, None


def _chunks(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, max(length, 1), size)]


def _scaled_logits(hidden: Tensor, weight: Tensor, temperatures: Tensor) -> Tensor:
    logits = hidden @ weight.T
    wide = torch.promote_types(logits.dtype, torch.float32)
    return logits.to(wide) / temperatures[:, None].to(wide)
