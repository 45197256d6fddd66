"""A model that vLLM samples from. Log-probs agree with those of transformers to rounding.

Weights are pulled into a staging copy in the host's memory, from which vLLM loads them between two
steps. Prefixes are shared in blocks of `generator.vllm.block_size` tokens, of one version only.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm import LLMEngine, RequestOutput
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.inputs import tokens_input

from forge_trainer.config import GeneratorConfig
from forge_trainer.errors import ConfigError
from forge_trainer.hf import (
    load_causal_lm,
    load_tokenizer,
    resolve_device,
    special_token_ids,
    stop_token_ids,
)
from forge_trainer.pieces import TensorFacts, WeightsVersion
from forge_trainer.types import Completion, GenerationRequest
from forge_trainer.types.arrays import as_array

from ..backend import RequestLimits
from .engine import build_engine
from .sampling import completion_of, require_temperature, vllm_params
from .staging import Staging


class VllmBackend:
    """Keeps the `Backend` protocol. Call `load` first."""

    def __init__(self, config: GeneratorConfig, *, model_dir: Path, dtype: torch.dtype) -> None:
        self._config = config
        self._model_dir = model_dir
        self._dtype = dtype
        self._requests: dict[str, GenerationRequest] = {}
        self._version = WeightsVersion(epoch=0, policy_version=0)

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The staging copy; vLLM does not see what is put there before `use_weights`."""
        return self._staging.tensors

    def load(self) -> None:
        """Read the directory. Its weights are policy version 0.

        Raises:
            ConfigError: the cache of keys and values has no room for a single completion.
        """
        device = resolve_device(self._config.device).type
        self._tokenizer: Any = load_tokenizer(self._model_dir)
        self._engine: LLMEngine = build_engine(
            self._config,
            model_dir=self._model_dir,
            dtype=str(self._dtype).removeprefix("torch."),
            device=device,
        )
        try:
            self._limits = self._find_limits()
        except ConfigError:
            self._stop_engine()
            raise
        cpu = torch.device("cpu")
        model: Any = load_causal_lm(self._model_dir, dtype=self._dtype, device=cpu)
        self._stop_ids = stop_token_ids(model.generation_config, self._tokenizer)
        self._staging = Staging(model)
        where = {"staging": self._staging.address}
        self._tell_workers("init_weight_transfer_engine", init_info=where)
        self._engine.set_weight_version(str(self._version.policy_version))

    def _find_limits(self) -> RequestLimits:
        config, model = self._config, self._engine.model_config
        wanted = config.max_prompt_tokens + config.max_completion_tokens
        if model.max_model_len < wanted:
            raise ConfigError(
                f"generator.vllm: the cache of keys and values has room for {model.max_model_len} "
                "tokens, generator.max_prompt_tokens + generator.max_completion_tokens are "
                f"{wanted}; raise kv_cache_gb (on a GPU gpu_memory_utilization)"
            )
        return RequestLimits(config.max_prompt_tokens, model.max_model_len, model.get_vocab_size())

    def encode(self, prompt: str) -> list[int]:
        """Its tokens."""
        ids: list[int] = self._tokenizer.encode(prompt)
        return ids

    def check(self, request: GenerationRequest) -> None:
        """Raises DataError for a request that cannot be answered."""
        self._limits.check(request)
        runner_v2 = bool(self._engine.vllm_config.use_v2_model_runner)
        require_temperature(request.sampling, runner_v2=runner_v2)

    def add(self, request: GenerationRequest) -> None:
        """It joins at the next step."""
        stop_ids = self._stop_ids | special_token_ids(self._tokenizer, request.sampling.stop)
        # Blocks of another version's keys and values have another salt, so none is found.
        prompt = tokens_input(as_array(request.token_ids).tolist(), cache_salt=str(self._version))
        self._engine.add_request(request.id, prompt, vllm_params(request, stop_ids))
        self._requests[request.id] = request

    def cancel(self, request_id: str) -> None:
        """No completion follows."""
        if self._requests.pop(request_id, None) is not None:
            self._engine.abort_request([request_id])

    def step(self) -> list[tuple[str, Completion]]:
        """One decoding step of all that run.

        Raises: what vLLM does; all that ran are cancelled, since none of them would ever end.
        """
        try:
            ended = [output for output in self._engine.step() if output.finished]
            return [(output.request_id, self._finish(output)) for output in ended]
        except Exception:
            self._start_over()
            raise

    def _start_over(self) -> None:
        self._engine.abort_request(list(self._requests))
        self._requests.clear()
        # Blocks of prompts are entered when they are planned, not when they are computed.
        self._engine.reset_prefix_cache(reset_running_requests=True)

    def _finish(self, output: RequestOutput) -> Completion:
        request = self._requests.pop(output.request_id)
        decoded = None
        if not request.sampling.stop:
            ids = output.outputs[0].token_ids
            decoded = str(self._tokenizer.decode(ids, skip_special_tokens=True))
        return completion_of(request, output, decoded)

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    def use_weights(self, version: WeightsVersion, *, keep_cache: bool) -> None:
        """Go on with what `tensors` hold; see `Backend`.

        Raises: what vLLM does. It may have taken a part of them, and is of no version then, until
            this succeeds.
        """
        self._tell_workers("start_weight_update")
        self._tell_workers("update_weights", update_info={})
        self._tell_workers("finish_weight_update")
        self._version = version
        self._engine.set_weight_version(str(version.policy_version))
        if not (keep_cache and self._requests):
            self._engine.reset_prefix_cache(reset_running_requests=True)

    def _tell_workers(self, method: str, **arguments: object) -> None:
        self._engine.collective_rpc(method, kwargs=arguments)

    def checksums(self) -> dict[str, TensorFacts]:
        """What vLLM loaded, by name: it keeps most of it in another shape itself."""
        return self._staging.checksums()

    def read_weight(self, name: str) -> Tensor:
        """A copy of a tensor that vLLM loaded, by any of its names; WeightsError without."""
        return self._staging.read(name)

    def close(self) -> None:
        self._stop_engine()
        self._staging.close()

    def _stop_engine(self) -> None:
        self._engine.engine_core.shutdown()
        # Its process groups would stay in this process.
        cleanup_dist_env_and_memory()
