"""What runs on a machine that waits for runs."""

from __future__ import annotations

from forge_trainer.config import TlsConfig

from .certificates import use_certificates


def serve(address: str, tls: TlsConfig | None) -> None:
    """Wait at `tcp://HOST:PORT`, or with certificates at `tls://HOST:PORT`, until it is ended."""
    use_certificates(tls)
    from monarch.actor import run_worker_loop_forever

    run_worker_loop_forever(address=address, ca="trust_all_connections")
