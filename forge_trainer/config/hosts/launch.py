"""Where the hosts of a run come from."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self
from urllib.parse import SplitResult, urlsplit

from pydantic import Field, IPvAnyAddress, PositiveInt, model_validator

from ..placement import Role
from ..section import Folder, Seconds, Section
from .kubernetes import KubernetesConfig

Port = Annotated[int, Field(ge=1, le=65535)]


LOST_HOST_NAMED_S = 12.0
"""Monarch needs some 10 s on top of the silence."""
HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.:-]*[A-Za-z0-9])?")


def worker_address(address: str) -> SplitResult:
    """The parts of tls://HOST:PORT or tcp://HOST:PORT; ValueError for anything else."""
    parts = urlsplit(address)
    if parts.scheme not in ("tcp", "tls") or not parts.hostname or not parts.port:
        raise ValueError(f"address {address!r} is not of the form tls://HOST:PORT")
    return parts


class TlsConfig(Section):
    """Certificates (PEM files) with which controller and workers know each other."""

    ca: Folder
    """Who signed the certificates of both sides."""
    certificate: Folder
    """Of this side, for server and client authentication, with the names of its host."""
    key: Folder


class SlurmConfig(Section):
    """One job for all hosts; what is left out is the cluster's default."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time_limit: str | None = None
    """HH:MM:SS"""
    cpus_per_task: PositiveInt | None = None
    mem: str | None = None
    """Memory per node as Slurm writes it, such as 500G."""
    exclusive: bool = True
    """Whole nodes. Of shared ones, say also which part: cpus_per_task and mem."""
    job_name: str = "forge_trainer"
    arguments: list[str] = []
    """Further options of sbatch, each beginning with a dash."""

    @model_validator(mode="after")
    def arguments_are_options(self) -> Self:
        for argument in self.arguments:
            if not argument.startswith("-"):
                raise ValueError(f"arguments: {argument!r} must begin with a dash")
        return self


class LaunchConfig(Section):
    kind: Literal["local", "processes", "hosts", "ssh", "slurm", "kubernetes"] = "local"
    """`local`: this machine. `processes`: several host processes on this machine, a stand-in for a
    cluster. `hosts`: workers that somebody else has started. `ssh`, `slurm`, `kubernetes`: workers
    that are started there."""
    hosts: dict[Role, PositiveInt] = {}
    """Hosts of every mesh, for `processes`, `slurm` and `kubernetes`. A mesh that is left out
    lies on the trainer's hosts."""
    addresses: dict[Role, list[str]] = {}
    """For `hosts`: where workers listen, such as tls://node1:22222. For `ssh`: machines."""
    gpus_per_host: Annotated[int, Field(ge=0)] | None = None
    """GPUs of every host. None counts those of this machine for `local`; elsewhere it is 0."""
    python: Folder | None = None
    """The interpreter on the hosts; None is the controller's own path."""
    port: Port = 22222
    """Where workers listen that are started by `ssh` and `slurm`."""
    bind: IPvAnyAddress | None = None
    """For `slurm`: the IP address, and no name, at which workers listen, where that is not the one
    of their host's name; 0.0.0.0 is all of them."""
    controller_address: str | None = None
    """Name or IPv4 address at which hosts reach this machine; None is its own name. For `hosts`,
    `ssh`, `slurm` and `kubernetes`. A name is looked up here."""
    interface: str | None = None
    """Network interface of torch's collectives, such as eth0; None leaves it to torch."""
    tls: TlsConfig | None = None
    """For `hosts`: nobody else is let in. Without it, a network must be closed to others."""
    slurm: SlurmConfig = SlurmConfig()
    kubernetes: KubernetesConfig | None = None
    start_timeout_s: Seconds = 600.0
    """For hosts to appear, a queue's waiting time included."""
    lost_host_s: Seconds = 5.0
    """Of silence after which a host counts as lost; it is named about 10 s later."""
    orphan_timeout_s: Seconds = 45.0
    """Hosts that have not heard of the controller for so long end by themselves."""

    @property
    def num_hosts(self) -> dict[Role, int]:
        """Hosts of every mesh that has some of its own."""
        if self.kind == "local":
            return {"trainer": 1}
        if self.kind in ("hosts", "ssh"):
            return {role: len(places) for role, places in self.addresses.items()}
        return dict(self.hosts)

    def mesh_of(self, role: Role) -> Role:
        """The role whose hosts it is on."""
        return role if role in self.num_hosts else "trainer"

    @model_validator(mode="after")
    def hosts_are_named_in_one_way(self) -> Self:
        by_address = self.kind in ("hosts", "ssh")
        wanted, other = ("addresses", "hosts") if by_address else ("hosts", "addresses")
        if getattr(self, other):
            raise ValueError(f"{other} says nothing to kind: {self.kind}; leave it out")
        if self.kind == "local" and self.hosts:
            raise ValueError("hosts: kind: local is this machine alone; choose another kind")
        if self.kind != "local" and not getattr(self, wanted).get("trainer"):
            raise ValueError(f"{wanted}.trainer is missing, which kind: {self.kind} needs")
        return self

    @model_validator(mode="after")
    def addresses_can_be_used(self) -> Self:
        places = [place for given in self.addresses.values() for place in given]
        if len(set(places)) < len(places) or not all(places) or not all(self.addresses.values()):
            raise ValueError(f"addresses: {self.addresses} must name hosts, each of them once")
        for place in places if self.kind == "ssh" else ():
            if not HOST_NAME.fullmatch(place):
                raise ValueError(
                    f"addresses: {place!r} is not the name or address of a machine; other settings "
                    "of ssh belong into its config file"
                )
        for place in places if self.kind == "hosts" else ():
            if (worker_address(place).scheme == "tls") != (self.tls is not None):
                raise ValueError(
                    f"addresses: {place!r}, but tls is {'given' if self.tls else 'not given'}; "
                    "certificates belong to tls:// addresses, and these need them"
                )
        return self

    @model_validator(mode="after")
    def a_lost_host_is_named_before_others_end(self) -> Self:
        if self.orphan_timeout_s < self.lost_host_s + LOST_HOST_NAMED_S:
            raise ValueError(
                f"orphan_timeout_s: {self.orphan_timeout_s} must be at least lost_host_s + "
                f"{LOST_HOST_NAMED_S:.0f}, or other hosts end before a lost one is named"
            )
        return self

    @model_validator(mode="after")
    def options_are_of_use(self) -> Self:
        if self.kind == "processes" and self.gpus_per_host:
            raise ValueError("gpus_per_host: kind: processes is a stand-in, which uses no GPU")
        away = ("hosts", "ssh", "slurm", "kubernetes")
        of_no_use = {
            "local": ("python", "controller_address", "interface"),
            "processes": ("controller_address",),
        }
        for name in of_no_use.get(self.kind, ()):
            if getattr(self, name) is not None:
                raise ValueError(f"{name} is for kinds {', '.join(away)}, and kind is {self.kind}")
        kinds = {"tls": "hosts", "kubernetes": "kubernetes", "slurm": "slurm", "bind": "slurm"}
        for name, kind in kinds.items():
            if getattr(self, name) != type(self).model_fields[name].default and self.kind != kind:
                raise ValueError(f"{name} is for kind: {kind}, and kind is {self.kind}")
        if self.kind == "kubernetes" and self.kubernetes is None:
            raise ValueError("kubernetes is missing, which kind: kubernetes needs")
        return self
