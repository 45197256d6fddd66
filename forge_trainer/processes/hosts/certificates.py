"""Certificates of this process, which Monarch reads when it is imported. Imports no Monarch."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from forge_trainer.config import TlsConfig
from forge_trainer.errors import ConfigError


def use_certificates(tls: TlsConfig | None) -> None:
    """Let this process, and those that it starts, speak to holders of certificates alone.

    Does nothing without any, or if they are in use already.

    Raises:
        ConfigError: a file is missing, or Monarch has been imported already, and would not see
            them.
    """
    if tls is None:
        return
    for name, file in tls.model_dump().items():
        if not Path(file).is_file():
            raise ConfigError(f"launch.tls.{name}: {file} is not a file")
    if _in_use(tls):
        return
    if "monarch" in sys.modules:
        raise ConfigError(
            "launch.tls: Monarch reads certificates when it is imported, which it has been; call "
            "forge_trainer.processes.hosts.certificates.use_certificates before that, or set "
            f"{', '.join(_variables(tls))} before Python starts"
        )
    os.environ.update(_variables(tls))


def _in_use(tls: TlsConfig) -> bool:
    return all(os.environ.get(name) == file for name, file in _variables(tls).items())


def _variables(tls: TlsConfig) -> dict[str, str]:
    return {
        "HYPERACTOR_TLS_CA": tls.ca,
        "HYPERACTOR_TLS_CERT": tls.certificate,
        "HYPERACTOR_TLS_KEY": tls.key,
    }
