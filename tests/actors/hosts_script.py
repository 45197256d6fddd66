"""A controller that takes hosts by a launch config, says what it got, and waits to be ended.

    python -m tests.actors.hosts_script '{"kind": "processes", ...}'

Run by itself, since what Monarch listens at is settled once per process.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from forge_trainer.config import GeneratorConfig, LaunchConfig, PlacementConfig, Role, TrainerConfig
from forge_trainer.processes.hosts.certificates import use_certificates

LAUNCH = LaunchConfig.model_validate_json(sys.argv[1])
use_certificates(LAUNCH.tls)

from monarch.actor import Actor, current_rank, endpoint  # noqa: E402  (after the certificates)

from forge_trainer.processes.hosts.launch import running_hosts  # noqa: E402
from forge_trainer.processes.hosts.placement import plan_placement  # noqa: E402
from forge_trainer.processes.meshes import prepare_controller, start_command  # noqa: E402
from forge_trainer.types import Gpu, HostInventory  # noqa: E402


class Witness(Actor):
    """Says where it is."""

    @endpoint
    async def tell(self) -> dict[str, Any]:
        names = ("CUDA_VISIBLE_DEVICES", "FORGE_TRAINER_HOST", "SLURM_NODEID")
        seen = {name: os.environ.get(name) for name in names}
        return {**seen, "rank": current_rank().rank, "pid": os.getpid(), "host_pid": os.getppid()}


async def main(launch: LaunchConfig, num_ranks: int, gpus: int) -> None:
    trainers: dict[Role, TrainerConfig] = {"trainer": TrainerConfig(num_ranks=num_ranks)}
    inventory = HostInventory(tuple(Gpu(str(i)) for i in range(gpus)))
    prepare_controller()
    async with running_hosts(launch, log_folder=Path.cwd()) as hosts:
        plans = plan_placement(
            trainers, GeneratorConfig(), PlacementConfig(), launch, inventory, hosts.cores
        )
        threads = {role: plan.cpu_threads for role, plan in plans.items()}
        told: dict[str, Any] = {"controller": os.getpid(), "cpu_threads": threads}
        for role, plan in plans.items():
            place = hosts.place(plan)
            assert place.hosts is not None
            mesh = place.hosts.spawn_procs(
                per_host={"ranks": plan.per_host},
                bootstrap_command=lambda point, place=place: start_command(place, point),
            )
            witnesses = mesh.spawn("witness", Witness)
            told[role] = list((await witnesses.tell.call()).values())
        print(json.dumps(told), flush=True)
        # Until somebody closes standard input.
        while await asyncio.to_thread(sys.stdin.readline):
            again = list((await witnesses.tell.call()).values())
            print(json.dumps(again), flush=True)
    print(json.dumps("closed"), flush=True)


if __name__ == "__main__":
    asyncio.run(main(LAUNCH, num_ranks=int(sys.argv[2]), gpus=int(sys.argv[3])))
