"""Directories with a tokenizer and a chat template, and a model that says what it is told to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from forge_trainer.types import Completion, GenerationRequest, Transcript

SPECIAL = ["<pad>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|header|>", "<|eot|>"]
CHATML = """\
{%- if tools %}{{- '<|im_start|>system\\n' }}{% for tool in tools %}{{- tool | tojson }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
  {%- if message.role == 'tool' %}
    {{- '<|im_start|>user\\n<tool_response>' + message.content + '</tool_response><|im_end|>\\n' }}
  {%- else %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
      {{- '<tool_call>' + {'name': call.function.name, 'arguments': call.function.arguments}
          | tojson + '</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
LLAMA3 = """\
{%- for message in messages %}
  {{- '<|start|>' + message.role + '<|header|>\\n\\n' }}
  {%- if message.tool_calls %}
    {{- '{"name": "' + message.tool_calls[0].function.name + '", "parameters": ' }}
    {{- message.tool_calls[0].function.arguments | tojson + '}' }}
  {%- else %}
    {{- message.content | trim }}
  {%- endif %}
  {{- '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant<|header|>\\n\\n' }}{% endif %}"""
STRIPS_THOUGHTS = """\
{%- set last = namespace(user=-1) %}
{%- for message in messages %}
  {%- if message.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
  {%- set said = message.content %}
  {%- if message.role == 'assistant' and loop.index0 < last.user and '</think>' in said %}
    {%- set said = said.split('</think>')[-1] %}
  {%- endif %}
  {{- '<|im_start|>' + message.role + '\\n' + said + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
"""In the manner of Qwen 3: what was thought before the last question is not shown again."""


def chat_directory(folder: Path, template: str | None = None) -> Path:
    """A byte-level tokenizer that merges `a` and `b`, and the template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *alphabet, "ab"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    whole: Any = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<|im_end|>"
    )
    whole.chat_template = template
    whole.save_pretrained(folder)
    return folder


class ScriptedModel:
    """Says one thing after another; its `generate_one` keeps the requests.

    Each saying is token ids, or text whose bytes are its tokens, without merges. One that does not
    end with `stop` has been cut.
    """

    def __init__(
        self, folder: Path, sayings: Sequence[str | Sequence[int]], stop: str = ""
    ) -> None:
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.sayings = list(sayings)
        self.requests: list[GenerationRequest] = []
        self._stop = self.tokenizer.token_to_id(stop) if stop else -1

    async def generate_one(self, request: GenerationRequest) -> Completion:
        number = len(self.requests)
        self.requests.append(request)
        token_ids = self.ids(self.sayings[number])[: request.sampling.max_completion_tokens]
        return Completion(
            prompt_token_ids=request.token_ids,
            token_ids=token_ids,
            logprobs=[-0.5 - number] * len(token_ids),
            policy_versions=[number] * len(token_ids),
            text=self.tokenizer.decode(token_ids, skip_special_tokens=True),
            temperature=request.sampling.temperature,
            stop_reason="stop" if token_ids[-1] == self._stop else "length",
        )

    def ids(self, saying: str | Sequence[int]) -> list[int]:
        if not isinstance(saying, str):
            return list(saying)
        parts = saying.replace("<|", "\0<|").replace("|>", "|>\0").split("\0")
        return [
            token
            for part in parts
            for piece in ([part] if part in SPECIAL else part)
            for token in self.tokenizer.encode(piece, add_special_tokens=False).ids
        ]

    def marked(self, transcript: Transcript) -> str:
        """Its text, with what was sampled between « and »."""
        shown, before = "", False
        for token, sampled in zip(transcript.token_ids, transcript.sampled, strict=True):
            shown += ("«" if sampled else "»") if sampled != before else ""
            shown += self.tokenizer.decode([int(token)], skip_special_tokens=False)
            before = bool(sampled)
        return shown + ("»" if before else "")
