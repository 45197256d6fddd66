"""The transformers backend: stop strings, keys and values of ragged rows, models it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM as Auto
from transformers import (
    BloomConfig,
    DynamicCache,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from forge_trainer.config import GeneratorConfig
from forge_trainer.errors import ConfigError, EngineError
from forge_trainer.generation.transformers import backend as backends
from forge_trainer.generation.transformers import rows
from forge_trainer.generation.transformers.backend import TransformersBackend
from forge_trainer.generation.transformers.model import DecodingModel
from forge_trainer.generation.transformers.rows import StopStrings
from forge_trainer.generation.transformers.slots import Slots
from forge_trainer.hf import load_tokenizer
from forge_trainer.pieces import WeightsVersion
from forge_trainer.types import Completion
from forge_trainer.types.arrays import as_array
from tests.generators import ragged_requests, request

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MOE: dict[str, Any] = {
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
TAKEN = {
    "llama": LlamaConfig(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **MOE),
    "mistral without a window": MistralConfig(**SIZES, sliding_window=None),
    "gpt2": GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=64),
}
WINDOW = "layers that do not attend to all earlier tokens"
REFUSED = {
    WINDOW: MistralConfig(**SIZES, sliding_window=16),
    "recurrent state": MambaConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2),
    "attention of its own": BloomConfig(vocab_size=50, hidden_size=32, n_layer=2, n_head=4),
    "rotary embeddings of type 'dynamic'": LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    ),
}


def _model(config: PreTrainedConfig) -> Any:
    torch.manual_seed(0)
    model: Any = Auto.from_config(config)
    return model.eval()


@torch.no_grad()
def _logits(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """After the last of them, without a cache."""
    logits: torch.Tensor = model(torch.tensor([list(ids)])).logits[0, -1]
    return logits


@pytest.mark.parametrize("config", TAKEN.values(), ids=TAKEN)
@torch.no_grad()
def test_rows_of_any_length_see_their_own_tokens_alone(config: PreTrainedConfig) -> None:
    """Rows join and leave between steps; every logit is that of a forward pass of the row alone."""
    model = _model(config)
    decoding = DecodingModel(model)
    slots = Slots(model.config, num_slots=8, device=torch.device("cpu"))
    random = np.random.default_rng(0)

    def some(length: int) -> list[int]:
        return [int(token) for token in random.integers(0, 50, length)]

    running: list[list[int]] = []

    def join(prompts: list[list[int]], which: list[int]) -> None:
        logits, cache = decoding.prefill([np.array(prompt, np.int32) for prompt in prompts])
        for prompt, found in zip(prompts, logits, strict=True):
            torch.testing.assert_close(found, _logits(model, prompt), atol=1e-5, rtol=1e-5)
        slots.append(cache, np.array(which), limit=60)
        running.extend(list(prompts[i]) for i in which)

    def step() -> None:
        lengths = np.array([len(row) for row in running])
        for row in running:
            row += some(1)
        last = np.array([row[-1] for row in running], np.int32)
        found = decoding.decode(last, slots, lengths, limit=60)
        for row, logits in zip(running, found, strict=True):
            torch.testing.assert_close(logits, _logits(model, row), atol=1e-5, rtol=1e-5)

    join([some(5), some(1), some(17)], [0, 0, 1, 2, 0])
    step()
    step()
    for source, hole in slots.remove([1, 4, 0]):
        running[hole] = running[source]
    del running[slots.num_rows :]
    step()
    join([some(30), some(2)], [1, 0])
    for _ in range(20):
        step()
    assert [len(row) for row in running] == [24, 40, 22, 50]


@pytest.mark.parametrize(("told", "config"), REFUSED.items(), ids=REFUSED)
def test_models_that_would_be_wrong_are_refused(told: str, config: PreTrainedConfig) -> None:
    with pytest.raises(ConfigError, match=f"transformers cannot sample from .* with {told}"):
        DecodingModel(_model(config))


def test_buffers_grow_with_need_and_go_with_the_last_row(tiny_qwen3: Path) -> None:
    """64 slots of 64 positions would be 4096; nine rows of at most 20 tokens need 9 x 32."""
    backend = _backend(tiny_qwen3, batch_size=64)
    for seed in range(9):
        backend.add(request([20] * 5, 15 - seed, seed=seed, greedy=True))
    backend.step()
    layer: Any = backend._slots._layers[0]
    assert layer.keys.shape == (9, 2, 32, 32)
    while backend.num_unfinished:
        backend.step()
    assert layer.keys is None


def test_what_is_added_later_gets_room(tiny_qwen3: Path) -> None:
    backend = _backend(tiny_qwen3, batch_size=64)
    backend.add(request([20] * 2, 10, greedy=True))
    requests = [request([20] * 2, 50, seed=seed, greedy=True) for seed in range(2)]
    for one in requests:
        backend.add(one)
        backend.step()
    layer: Any = backend._slots._layers[0]
    assert layer.keys.shape == (3, 2, 64, 32)
    backend.cancel(requests[0].id)
    assert backend.num_unfinished == 2


def test_long_prompts_are_computed_in_several_passes(
    tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "PREFILL_TOKENS", 20)
    computed: list[list[int]] = []
    prefill = DecodingModel.prefill

    def watched(model: DecodingModel, prompts: Any) -> Any:
        computed.append([len(prompt) for prompt in prompts])
        return prefill(model, prompts)

    monkeypatch.setattr(DecodingModel, "prefill", watched)
    backend = _backend(tiny_qwen3)
    for length in (9, 2, 30, 10, 3):
        backend.add(request([20 + length] * length, 3, greedy=True))
    backend.step()
    assert computed == [[2, 3], [9, 10], [30]]
    computed.clear()
    backend.use_weights(WeightsVersion(0, 1), keep_cache=False)
    assert computed == [[3, 4], [10], [11], [31]]


def test_kept_keys_and_values_are_those_of_the_old_weights(tiny_qwen3: Path) -> None:
    """Made by hand: a cache that the old model filled, read by the new one."""
    backend = _backend(tiny_qwen3)
    asked = request([20, 30, 40], 12, seed=4, temperature=0.8)
    backend.add(asked)
    for _ in range(4):
        # The first step takes two tokens: the prompt's, and one of decoding.
        backend.step()
    model = backend._model._model
    old = {name: tensor.clone() for name, tensor in backend.tensors.items()}
    new = {name: tensor + 0.1 * torch.randn_like(tensor) for name, tensor in old.items()}

    def fill(values: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, tensor in backend.tensors.items():
                tensor.copy_(values[name])

    fill(new)
    backend.use_weights(WeightsVersion(0, 1), keep_cache=True)
    ((_, completion),) = _finish(backend)
    ids = [*asked.token_ids, *as_array(completion.token_ids).tolist()]
    assert as_array(completion.policy_versions).tolist() == [0] * 5 + [1] * 7
    fill(old)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        before = model(torch.tensor([ids[:7]]), past_key_values=cache, use_cache=True).logits[0, 2:]
        fill(new)
        after = model(torch.tensor([ids[7:-1]]), past_key_values=cache, use_cache=True).logits[0]
    found = torch.log_softmax(torch.cat([before, after]) / 0.8, dim=-1)
    wanted = found.gather(1, torch.tensor(ids[3:])[:, None]).squeeze(1)
    np.testing.assert_allclose(completion.logprobs, wanted.numpy(), atol=1e-5)


def test_weights_that_are_not_finite_fail_the_step_and_nothing_after(tiny_qwen3: Path) -> None:
    """What such a step leaves in the cache once would have spoilt the padding of later rows."""
    backend = _backend(tiny_qwen3)
    wanted = _complete(backend)
    norm = backend.tensors["model.norm.weight"]
    good = norm.clone()
    with torch.no_grad():
        norm.fill_(torch.nan)
    asked = ragged_requests(5)
    for one in asked:
        backend.add(one)
    with pytest.raises(EngineError, match="logits are not finite"):
        backend.step()
    for one in asked:
        backend.cancel(one.id)
    with torch.no_grad():
        norm.copy_(good)
    assert _complete(backend) == wanted


def _complete(backend: TransformersBackend) -> list[Completion]:
    asked = ragged_requests(6, longest=20)
    for one in asked:
        backend.add(one)
    done = dict(_finish(backend))
    return [done[one.id] for one in asked]


def _finish(backend: TransformersBackend) -> list[tuple[str, Completion]]:
    ended = []
    while backend.num_unfinished:
        ended += backend.step()
    return ended


def _backend(model_dir: Path, **config: Any) -> TransformersBackend:
    backend = TransformersBackend(
        GeneratorConfig(device="cpu", **config), model_dir=model_dir, dtype=torch.float32
    )
    backend.load()
    return backend


def _find(tokenizer: Any, text: str, stop: Sequence[str]) -> tuple[int, str] | None:
    """After how many bytes it is found, and the text before it."""
    strings = StopStrings(tokenizer, stop)
    for number, token_id in enumerate(tokenizer.encode(text), 1):
        found = strings.find(token_id)
        if found is not None:
            return number, found
    return None


@pytest.mark.parametrize(
    ("text", "stop", "wanted"),
    [
        ("one two three", ["two"], (7, "one ")),
        ("one two three", ["three", "two"], (7, "one ")),
        ("aab", ["ab", "b"], (3, "a")),
        ("one", ["two"], None),
        # Characters of two and three bytes; a token is a byte.
        ("pré€s", ["é€"], (7, "pr")),
        ("é", ["é"], (2, "")),
        ("\n\nx", ["\n\n"], (2, "")),
    ],
)
def test_a_stop_string_is_found_with_the_token_that_completes_it(
    tiny_qwen3: Path, text: str, stop: list[str], wanted: tuple[int, str] | None
) -> None:
    assert _find(load_tokenizer(tiny_qwen3), text, stop) == wanted


def test_a_stop_string_is_found_after_bytes_that_are_no_text(tiny_qwen3: Path) -> None:
    tokenizer = load_tokenizer(tiny_qwen3)
    half = tokenizer.convert_tokens_to_ids("Ã")
    broken = [half, half, tokenizer.pad_token_id]
    strings = StopStrings(tokenizer, ["b!"])
    ids = [*broken, *tokenizer.encode("ab!")]
    found = [strings.find(token_id) for token_id in ids]
    assert found[:-1] == [None] * 5
    assert found[-1] == tokenizer.decode(ids, skip_special_tokens=True)[:-2]


def test_a_text_that_changes_as_it_grows_is_read_from_there(
    tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tokenizers gives up such a stream with an error, which once would have failed the step."""
    tokenizer = load_tokenizer(tiny_qwen3)

    class GivesUpOnce:
        fails = True

        def __init__(self, **_: bool) -> None: ...

        def step(self, _: Any, token_id: int) -> str:
            if GivesUpOnce.fails:
                GivesUpOnce.fails = False
                raise Exception("Invalid prefix encountered while decoding stream")
            return str(tokenizer.decode([token_id]))

    monkeypatch.setattr(rows, "DecodeStream", GivesUpOnce)
    assert _find(tokenizer, "ab!c", ["b!"]) == (3, "a")


def test_a_special_token_stops_where_it_is_a_stop_string(tiny_qwen3: Path) -> None:
    """It is no part of the text, where it would never be found."""
    backend = _backend(tiny_qwen3)
    backend.add(request(stop=("<unk>", "x")))
    backend.step()
    (row,) = backend._rows
    assert row.stop_ids - backend._stop_ids == {backend._tokenizer.unk_token_id}
