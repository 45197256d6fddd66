"""Log-probs of given tokens from hidden states, without ever holding [N, V] logits.

The vocabulary axis stays in this file: the rest of the project sees one number per token. The
forward pass keeps only the log-sum-exp of each token; the backward pass recomputes the logits
of one chunk of tokens at a time. Where ranks hold a part of the vocabulary each, they exchange
three numbers per token and never logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor

DEFAULT_CHUNK_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class VocabShard:
    """Which rows of the vocabulary this rank's weight holds, and who holds the others."""

    start: int
    """The token id of the weight's first row."""
    group: dist.ProcessGroup
    """The ranks whose weights make up the vocabulary."""


@dataclass(frozen=True, slots=True)
class LogprobOptions:
    """How log-probs are computed; none of it changes their values."""

    chunk_tokens: int = DEFAULT_CHUNK_TOKENS
    """Tokens whose logits exist at one time."""
    with_entropy: bool = False
    shard: VocabShard | None = None
    """None: the weight holds the whole vocabulary."""


def selected_logprobs(
    hidden_NH: Float[Tensor, "N H"],
    weight_VH: Float[Tensor, "V H"],
    targets_N: Int[Tensor, " N"],
    temperatures_N: Float[Tensor, " N"],
    options: LogprobOptions = LogprobOptions(),
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"] | None]:
    """log softmax(hidden @ weight.T / temperature) at each target, and the entropy if asked for.

    Both are in nats, float32 (float64 for float64 inputs), and differentiable with respect to
    hidden states and weight. Peak extra memory is a few times chunk_tokens * V numbers. On a
    vocabulary shard, targets are still ids of the whole vocabulary, the results are those of the
    whole, and the gradient of the hidden states is this shard's part of a sum over the group.

    Example:
        hidden [[1, 0]], weight [[1, 0], [0, 1]], target 0, temperature 1
        -> logits [1, 0] -> log-prob 1 - log(e + 1) = -0.3133
    """
    return _SelectedLogprobs.apply(  # type: ignore[no-untyped-call, no-any-return]
        hidden_NH, weight_VH, targets_N, temperatures_N, options
    )


def token_logprobs(
    hidden_BTH: Float[Tensor, "B T H"],
    weight_VH: Float[Tensor, "V H"],
    token_ids_BT: Int[Tensor, "B T"],
    document_ids_BT: Int[Tensor, "B T"],
    temperatures_BT: Float[Tensor, "B T"],
    options: LogprobOptions = LogprobOptions(),
    *,
    wanted_BT: Bool[Tensor, "B T"] | None = None,
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"] | None]:
    """The log-prob of every token given those before it in its document, at that token's index.

    Token t is predicted from hidden state t-1; this shift is done here and nowhere else. The
    first token of a document, padding, and what is not in `wanted_BT`, get 0.0; the last costs
    nothing.
    """
    H = hidden_BTH.shape[-1]
    predicted_BT = has_prediction(document_ids_BT)[:, 1:]
    columns = (
        hidden_BTH[:, :-1].reshape(-1, H),
        token_ids_BT[:, 1:].reshape(-1),
        temperatures_BT[:, 1:].reshape(-1),
    )
    chosen_N = None
    if wanted_BT is not None:
        # Their number is asked of the device, which is waited for.
        chosen_N = (wanted_BT[:, 1:] & predicted_BT).reshape(-1).nonzero().squeeze(1)
        columns = tuple(column.index_select(0, chosen_N) for column in columns)  # type: ignore[assignment]
    hidden_NH, targets_N, temperatures_N = columns
    logprobs_N, entropies_N = selected_logprobs(
        hidden_NH, weight_VH, targets_N, temperatures_N, options
    )
    logprobs_BT = _at_targets(logprobs_N, chosen_N, predicted_BT)
    if entropies_N is None:
        return logprobs_BT, None
    return logprobs_BT, _at_targets(entropies_N, chosen_N, predicted_BT)


def has_prediction(document_ids_BT: Int[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
    """True where a token follows another one of the same document."""
    same = document_ids_BT[:, 1:] == document_ids_BT[:, :-1]
    real = document_ids_BT[:, 1:] >= 0
    return torch.nn.functional.pad(same & real, (1, 0), value=False)


def _at_targets(values_N: Tensor, chosen_N: Tensor | None, predicted: Tensor) -> Tensor:
    zeros = values_N.new_zeros(predicted.shape)
    if chosen_N is None:
        kept = torch.where(predicted, values_N.view(predicted.shape), zeros)
    else:
        kept = zeros.view(-1).index_copy(0, chosen_N, values_N).view(predicted.shape)
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
        options: LogprobOptions,
    ) -> tuple[Tensor, Tensor | None]:
        start = options.shard.start if options.shard else 0
        weight_for_logits = _for_logits(weight)
        rows_of = [
            _chunk_numbers(
                _scaled_logits(hidden[rows], weight_for_logits, temperatures[rows]),
                targets[rows] - start,
                with_entropy=options.with_entropy,
            )
            for rows in _chunks(hidden.shape[0], options.chunk_tokens)
        ]
        lse, target_logits, mean_logits = torch.cat(rows_of, dim=1)
        if options.shard is not None:
            lse, target_logits, mean_logits = _combine(
                torch.stack([lse, target_logits, mean_logits]), options.shard.group
            )
        entropy_N = lse - mean_logits if options.with_entropy else None
        ctx.save_for_backward(hidden, weight, targets, temperatures, lse, entropy_N)
        ctx.options = options
        return target_logits - lse, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_logprobs, grad_entropy = grads
        hidden, weight, targets, temperatures, lse, entropy = ctx.saved_tensors
        start = ctx.options.shard.start if ctx.options.shard else 0
        wide = lse.dtype
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        weight_for_logits = _for_logits(weight)
        for rows in _chunks(hidden.shape[0], ctx.options.chunk_tokens):
            # In place from here on: one [chunk, V] buffer at a time, two with entropy.
            log_p = _scaled_logits(hidden[rows], weight_for_logits, temperatures[rows])
            log_p.sub_(lse[rows, None])
            grad_z = torch.zeros_like(log_p) if grad_logprobs is None else None
            if grad_entropy is not None and entropy is not None:
                upstream = grad_entropy[rows, None].to(wide)
                grad_z = torch.exp(log_p).mul_(log_p + entropy[rows, None]).mul_(-upstream)
            if grad_logprobs is not None:
                upstream = grad_logprobs[rows, None].to(wide)
                of_logprobs = log_p.exp_().mul_(-upstream)
                index, is_here = _local_index(targets[rows] - start, of_logprobs.shape[-1])
                of_logprobs.scatter_add_(-1, index[:, None], upstream * is_here[:, None])
                grad_z = of_logprobs if grad_z is None else grad_z.add_(of_logprobs)
            assert grad_z is not None
            grad_logits = grad_z.div_(temperatures[rows, None].to(wide)).to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[rows])
            if grad_weight is not None and grad_weight.dtype == hidden.dtype:
                grad_weight.addmm_(grad_logits.T, hidden[rows])
            elif grad_weight is not None:
                grad_weight += (grad_logits.T @ hidden[rows]).to(wide)
        narrow = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, narrow, None, None, None


def _chunk_numbers(z: Tensor, local_targets: Tensor, *, with_entropy: bool) -> Tensor:
    """[3, n]: log-sum-exp, the target's logit (0 if elsewhere), and sum_j p_j z_j."""
    lse = torch.logsumexp(z, dim=-1)
    index, is_here = _local_index(local_targets, z.shape[-1])
    target = z.gather(-1, index[:, None]).squeeze(-1)
    target = torch.where(is_here, target, torch.zeros_like(target))
    mean = torch.zeros_like(lse)
    if with_entropy:
        mean = (torch.exp(z - lse[:, None]) * z).sum(-1)
    return torch.stack([lse, target, mean])


def _local_index(local_targets: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Row indices that are safe to use, and where they mean something."""
    is_here = (local_targets >= 0) & (local_targets < rows)
    return local_targets.clamp(0, rows - 1), is_here


def _combine(numbers: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """The numbers of `_chunk_numbers` for the whole vocabulary, from those of all shards."""
    shards = [torch.empty_like(numbers) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shards, numbers.contiguous(), group=group)
    lse_S, target_S, mean_S = torch.stack(shards, dim=1)
    lse = torch.logsumexp(lse_S, dim=0)
    return lse, target_S.sum(0), (torch.exp(lse_S - lse) * mean_S).sum(0)


def _chunks(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, max(length, 1), size)]


def _for_logits(weight: Tensor) -> Tensor:
    """The weight as `_scaled_logits` multiplies with it; in float32, once for all chunks, where
    products of narrow numbers cannot be summed and returned in float32 otherwise."""
    return weight if weight.is_cuda else weight.to(_wide(weight))


def _scaled_logits(hidden: Tensor, weight: Tensor, temperatures: Tensor) -> Tensor:
    """In float32 or wider, never rounded to bfloat16: between 16 and 32 its numbers are 1/8 apart,
    which is up to 6% of a token's probability."""
    wide = _wide(hidden)
    if hidden.is_cuda and hidden.dtype != wide:
        logits = torch.mm(hidden, weight.T, out_dtype=wide)
    else:
        logits = hidden.to(wide) @ weight.T
    return logits.div_(temperatures[:, None].to(wide))


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
