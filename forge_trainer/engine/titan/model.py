"""A TorchTitan model from a Hugging Face `config.json`: Llama 3 and Qwen 3, dense."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchtitan.models.common import (
    ComplexRoPE,
    CosSinRoPE,
    Embedding,
    Linear,
    RMSNorm,
    RoPE,
)
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.llama3 import model_registry as llama3_registry
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.models.qwen3 import model_registry as qwen3_registry
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.protocols.model_spec import ModelSpec

from .support import refuse_unsupported, rope_parameters

_LOADED_LATER: dict[str, Callable[..., Any]] = {"weight": skip_param_init}
"""No random weights: every parameter comes from the Hugging Face directory."""


@dataclass(frozen=True, slots=True)
class _Family:
    registry: Callable[[str], ModelSpec]
    model: type[Decoder]
    block: type[Any]
    rope: Callable[[dict[str, Any], int, int], RoPE.Config]
    has_qk_norm: bool


def build_model_spec(
    hf_config: dict[str, Any], *, max_sequence_tokens: int, inner_attention: FlexAttention.Config
) -> ModelSpec:
    """TorchTitan's spec of the model: its config, parallelize function and state-dict adapter.

    Raises:
        ConfigError: the directory asks for something TorchTitan's model does not have.
    """
    family = _FAMILIES[hf_config["model_type"]]
    refuse_unsupported(hf_config)
    dim, vocab_size = hf_config["hidden_size"], hf_config["vocab_size"]
    num_heads = hf_config["num_attention_heads"]
    head_dim = hf_config.get("head_dim") or dim // num_heads
    eps = hf_config["rms_norm_eps"]
    rope = family.rope(hf_config, head_dim, max_sequence_tokens)

    def norm(size: int) -> RMSNorm.Config:
        return RMSNorm.Config(normalized_shape=size, eps=eps, param_init=_LOADED_LATER)

    layers = [
        family.block.Config(
            attention_norm=norm(dim),
            ffn_norm=norm(dim),
            attention=make_gqa_config(
                dim=dim,
                n_heads=num_heads,
                n_kv_heads=hf_config.get("num_key_value_heads") or num_heads,
                head_dim=head_dim,
                wqkv_param_init=_LOADED_LATER,
                wo_param_init=_LOADED_LATER,
                inner_attention=inner_attention,
                rope=rope,
                qk_norm=norm(head_dim) if family.has_qk_norm else None,
            ),
            feed_forward=make_ffn_config(
                dim=dim,
                hidden_dim=hf_config["intermediate_size"],
                w1_param_init=_LOADED_LATER,
                w2w3_param_init=_LOADED_LATER,
            ),
        )
        for _ in range(hf_config["num_hidden_layers"])
    ]
    spec = family.registry("debugmodel")
    spec.flavor = "from_hf"
    spec.model = family.model.Config(
        dim=dim,
        vocab_size=vocab_size,
        enable_weight_tying=hf_config.get("tie_word_embeddings", False),
        tok_embeddings=Embedding.Config(
            num_embeddings=vocab_size, embedding_dim=dim, param_init=_LOADED_LATER
        ),
        norm=norm(dim),
        lm_head=Linear.Config(in_features=dim, out_features=vocab_size, param_init=_LOADED_LATER),
        layers=layers,
    )
    return spec


def _llama_rope(hf_config: dict[str, Any], head_dim: int, max_tokens: int) -> RoPE.Config:
    rope = rope_parameters(hf_config)
    if rope["rope_type"] == "default":
        return ComplexRoPE.Config(dim=head_dim, max_seq_len=max_tokens, theta=rope["rope_theta"])
    return ComplexRoPE.Config(
        dim=head_dim,
        max_seq_len=max_tokens,
        theta=rope["rope_theta"],
        scaling="llama",
        scaling_factor=rope["factor"],
        low_freq_factor=rope["low_freq_factor"],
        high_freq_factor=rope["high_freq_factor"],
        original_max_position_embeddings=rope["original_max_position_embeddings"],
    )


def _qwen3_rope(hf_config: dict[str, Any], head_dim: int, max_tokens: int) -> RoPE.Config:
    rope = rope_parameters(hf_config)
    return CosSinRoPE.Config(dim=head_dim, max_seq_len=max_tokens, theta=rope["rope_theta"])


_FAMILIES = {
    "llama": _Family(llama3_registry, Llama3Model, Llama3TransformerBlock, _llama_rope, False),
    "qwen3": _Family(qwen3_registry, Qwen3Model, Qwen3TransformerBlock, _qwen3_rope, True),
}
