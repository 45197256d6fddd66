"""Wait on this machine for runs with launch.kind: hosts, one after another.

    python -m apps.host.main --address tls://node1:22222 --ca ca.pem --certificate node1.pem \
        --key node1.key

Whoever can connect runs code here. With certificates, only holders of one by the same CA can;
without (tcp://), the network itself must be closed to everybody else. Exit codes: 0 ended, 2 an
argument cannot work.
"""

from __future__ import annotations

import argparse
import ipaddress
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from forge_trainer.config.hosts.launch import worker_address

OK, BAD_ARGUMENT = 0, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until the process is ended; the exit code."""
    parser = argparse.ArgumentParser(
        prog="apps.host.main",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--address", required=True, help="tls://HOST:PORT or tcp://HOST:PORT")
    parser.add_argument("--ca", help="PEM file of who signed the certificates of both sides")
    parser.add_argument("--certificate", help="PEM file with the names of this host")
    parser.add_argument("--key", help="PEM file of the certificate's key")
    given = parser.parse_args(arguments)
    certificates = {name: getattr(given, name) for name in ("ca", "certificate", "key")}
    try:
        _check(given.address, certificates)
    except ValueError as error:
        print(f"--address {given.address}: {error}", file=sys.stderr)
        return BAD_ARGUMENT

    from forge_trainer.config import TlsConfig
    from forge_trainer.processes.hosts.worker import serve

    serve(given.address, TlsConfig(**certificates) if given.ca else None)
    return OK


def _check(address: str, certificates: dict[str, str | None]) -> None:
    """Raises ValueError for what is no address, has no certificates, or listens everywhere."""
    parts = worker_address(address)
    missing = [f"--{name}" for name, file in certificates.items() if file is None]
    if parts.scheme == "tls" and missing:
        raise ValueError(f"tls needs {', '.join(missing)}")
    if parts.scheme == "tcp" and len(missing) < len(certificates):
        raise ValueError("certificates are for tls:// addresses")
    for name, file in certificates.items():
        if file is not None and not Path(file).is_file():
            raise ValueError(f"--{name} {file} is not a file")
    try:
        found = ipaddress.ip_address(socket.gethostbyname(str(parts.hostname)))
    except OSError as error:
        raise ValueError(f"{parts.hostname} has no address here ({error.strerror})") from error
    if found.is_unspecified and parts.scheme == "tcp":
        raise ValueError("listens on all interfaces; name the one of a closed network")


if __name__ == "__main__":
    sys.exit(main())
