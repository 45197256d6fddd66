"""Hugging Face directories: a model's facts, tokenizer and weights, and tiny ones on the fly."""

from .chat import ChatTemplate, has_chat_template
from .facts import (
    ModelFacts,
    find_model_dir,
    read_hf_config,
    read_model_facts,
    require_full_attention,
    resolve_device,
)
from .tiny import create_tiny_model, model_directory
from .tokenizer import (
    TextEncoder,
    largest_token_id,
    load_tokenizer,
    require_special_tokens,
    special_token_ids,
    stop_token_ids,
    token_counter,
)
from .weights import (
    count_parameters,
    load_causal_lm,
    load_weights,
    require_whole_weights,
    unique_tensors,
)

__all__ = [
    "ChatTemplate",
    "ModelFacts",
    "TextEncoder",
    "count_parameters",
    "create_tiny_model",
    "find_model_dir",
    "has_chat_template",
    "largest_token_id",
    "load_causal_lm",
    "load_tokenizer",
    "load_weights",
    "model_directory",
    "read_hf_config",
    "read_model_facts",
    "require_full_attention",
    "require_special_tokens",
    "require_whole_weights",
    "resolve_device",
    "special_token_ids",
    "stop_token_ids",
    "token_counter",
    "unique_tensors",
]
