"""vLLM's engine in this process, as a generator's config wants it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path

from vllm import EngineArgs, LLMEngine
from vllm.config import WeightTransferConfig
from vllm.triton_utils import dispatcher
from vllm.v1.executor import Executor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from forge_trainer.config import GeneratorConfig

from .greedy import GreedyTemperature
from .support import KV_CACHE_GB_ON_CPU
from .weights import NAME, Worker


def build_engine(config: GeneratorConfig, *, model_dir: Path, dtype: str, device: str) -> LLMEngine:
    """An engine that has loaded the directory's weights, in `dtype`, on `cpu` or `cuda`."""
    args = engine_args(config, model_dir=model_dir, dtype=dtype, device=device)
    vllm_config = args.create_engine_config()
    if not vllm_config.use_v2_model_runner:
        vllm_config.model_config.logits_processors = [GreedyTemperature]
    with _looking_at_all_modules():
        return LLMEngine(
            vllm_config,
            Executor.get_class(vllm_config),
            log_stats=False,
            # The environment variable would say otherwise.
            multiprocess_mode=False,
        )


@contextlib.contextmanager
def _looking_at_all_modules() -> Iterator[None]:
    """On the CPU vLLM 0.32.0 asks everything in all modules of the process for a `__dict__`, and
    fails where that raises, as Flask's proxies do outside of a request."""

    def has(value: object, name: str) -> bool:
        try:
            return hasattr(value, name)
        except Exception:
            return False

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`torch.distributed.reduce_op` is deprecated")
        dispatcher.hasattr = has
        try:
            yield
        finally:
            del dispatcher.hasattr


def engine_args(config: GeneratorConfig, *, model_dir: Path, dtype: str, device: str) -> EngineArgs:
    """What the config says, in vLLM's words."""
    options, on_cpu = config.vllm, device == "cpu"
    kv_cache_gb = options.kv_cache_gb or (KV_CACHE_GB_ON_CPU if on_cpu else None)
    return EngineArgs(
        model=str(model_dir),
        dtype=dtype,
        # As long as the cache has room for, and the model can.
        max_model_len=-1,
        max_num_seqs=config.batch_size,
        tensor_parallel_size=config.tensor_parallel,
        # Given by its class: for the name "uni" it would look at an environment variable.
        distributed_executor_backend="mp" if config.tensor_parallel > 1 else UniProcExecutor,
        worker_extension_cls=f"{Worker.__module__}.{Worker.__qualname__}",
        weight_transfer_config=WeightTransferConfig(backend=NAME),
        kv_cache_memory_bytes=None if kv_cache_gb is None else int(kv_cache_gb * 1e9),
        gpu_memory_utilization=options.gpu_memory_utilization,
        block_size=options.block_size,
        enforce_eager=on_cpu if options.enforce_eager is None else options.enforce_eager,
        enable_prefix_caching=True,
        # Those of the distribution that was sampled from.
        logprobs_mode="processed_logprobs",
        # With it, a step is on its way while weights change between two steps.
        async_scheduling=False,
        # The directory's sampling defaults would make the log-probs those of another distribution.
        generation_config="vllm",
        disable_log_stats=True,
        use_tqdm_on_load=False,
    )
