"""Weights over torchstore: from two ranks to a generator, to plain clients, and over hosts."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from monarch._src.actor.host_mesh import default_bootstrap_cmd
from monarch.actor import ProcMesh, this_host
from torch import Tensor

from forge_trainer.config import WeightsConfig
from forge_trainer.functional.pieces.manifests import build_manifest, describe_tensor
from forge_trainer.pieces import StoreAddress, WeightPiece
from forge_trainer.processes.meshes import _bootstrap, prepare_controller, start_store, stop_store
from forge_trainer.weights.torchstore.store import TorchStoreWeightStore
from tests.actors.conftest import Cluster, running_cluster
from tests.actors.plain_client import PlainClient, without_the_library
from tests.actors.readers import Writer
from tests.data import random_sequences
from tests.processes import descendants, wait_until_gone
from tests.weights import V0, V1, read_all

GOOD = random_sequences(6)
WEIGHTS = WeightsConfig(transport="torchstore")
DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "trainer.md"
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def stored(tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two trainer ranks and a generator, with torchstore between them."""
    folder = tmp_path_factory.mktemp("checkpoints")
    with running_cluster(tiny_qwen3, folder, weights=WEIGHTS) as cluster:
        yield cluster


@contextlib.asynccontextmanager
async def _plain_client() -> AsyncIterator[Any]:
    mesh = this_host().spawn_procs(per_host={"ranks": 1}, bootstrap=without_the_library)
    try:
        yield mesh.spawn("plain", PlainClient)
    finally:
        await mesh.stop("closed")


def _example() -> str:
    """What the documents show to users of torchstore."""
    text = DOCUMENT.read_text().split("without this library")[1]
    found = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert found is not None
    return found[1]


def test_what_two_ranks_train_is_what_the_generator_runs_on(stored: Cluster) -> None:
    first = stored.run(stored.trainer.push_weights())
    assert first.transport == "torchstore"
    stored.run(stored.trainer.train_step(GOOD, loss="grpo"))
    ref = stored.run(stored.trainer.push_weights())
    assert stored.run(stored.generator.pull_weights(ref)) == ref.version
    _, published = stored.run(read_all(stored.store, ref.version))
    _, before = stored.run(read_all(stored.store, first.version))
    assert any(not torch.equal(published[name], before[name]) for name in published)
    found = stored.run(stored.generator.weight_checksums())
    assert found.version == ref.version
    assert {name: facts.checksum for name, facts in found.tensors.items()} == {
        name: describe_tensor(tensor).checksum for name, tensor in published.items()
    }


def test_the_documented_example_reads_what_was_published(stored: Cluster) -> None:
    stored.run(stored.trainer.train_step(GOOD, loss="grpo"))
    ref = stored.run(stored.trainer.push_weights())
    _, published = stored.run(read_all(stored.store, ref.version))
    name = stored.services.store.address.location

    async def scenario() -> tuple[str, Tensor, Tensor, dict[str, Tensor]]:
        async with _plain_client() as client:
            found: tuple[str, Tensor, Tensor, dict[str, Tensor]]
            found = await client.run.call_one(_example(), "read", name, EMBEDDING)
            return found

    version, whole, part, state_dict = stored.run(scenario())
    assert version == str(ref.version)
    wanted = published[EMBEDDING]
    assert torch.equal(whole, wanted)
    # Over both ranks' shards.
    assert torch.equal(part, wanted[len(wanted) // 2 - 2 : len(wanted) // 2 + 2])
    assert state_dict.keys() == published.keys()
    assert all(torch.equal(state_dict[name], tensor) for name, tensor in published.items())


def test_a_tied_tensor_has_a_key_under_each_of_its_names(stored: Cluster) -> None:
    stored.run(stored.trainer.train_step(GOOD, loss="grpo"))
    ref = stored.run(stored.trainer.push_weights())

    async def scenario() -> list[Tensor]:
        client = await TorchStoreWeightStore(stored.services.store.address.location).client()
        names = (EMBEDDING, "lm_head.weight")
        return [await client.get(f"weights/{ref.version}/{name}") for name in names]

    assert torch.equal(*stored.run(scenario()))


@contextlib.asynccontextmanager
async def _on_hosts(name: str, hosts: Sequence[str]) -> AsyncIterator[ProcMesh]:
    """A process on each of these hosts of a run, which all are this machine."""
    mesh = this_host().spawn_procs(
        per_host={"ranks": len(hosts)},
        bootstrap=functools.partial(_bootstrap, name, 1, None, first_rank=0, takes_output=False),
        bootstrap_command=lambda point: default_bootstrap_cmd().with_env(
            {"FORGE_TRAINER_HOST": hosts[point["ranks"]]}
        ),
        name=name,
    )
    try:
        yield mesh
    finally:
        await mesh.stop("closed")


TABLE = torch.arange(48.0).reshape(8, 6)
HOSTS = ["trainer/0", "trainer/1"]


async def _publish_on_hosts(store: TorchStoreWeightStore, writers: Any) -> None:
    """Two ranks write a half of the table each; nobody sees it before it is published."""
    parts = []
    for rank in range(2):
        rows = TABLE[4 * rank :][:4]
        piece = WeightPiece("table", (8, 6), (4 * rank, 0), rows, torch.float32)
        parts.append(await writers.slice(ranks=rank).write.call_one(V0, rank, [piece]))
    assert [part.location.rpartition("@")[2] for part in parts] == HOSTS
    assert await (await store.client()).keys() == []
    await store.commit(build_manifest(V0, store.transport, parts))


def test_shards_lie_on_their_own_hosts_and_clients_get_the_whole() -> None:
    """Two hosts with a volume and a rank each; the reader is on a third, which has none."""

    async def scenario() -> None:
        prepare_controller()
        async with (
            _on_hosts("trainer", HOSTS) as trainers,
            _plain_client() as plain,
            _on_hosts("store", HOSTS) as volumes,
        ):
            await start_store(volumes, "on_hosts")
            store = TorchStoreWeightStore("on_hosts")
            writers = trainers.spawn(
                "writer", Writer, StoreAddress("torchstore", "on_hosts"), WEIGHTS
            )
            await _publish_on_hosts(store, writers)
            assert torch.equal((await read_all(store))[1]["table"], TABLE)
            client = await store.client()
            lies = {
                volume: [one.offsets for one in info.tensor_slices]
                for volume, info in (await client._locate_volumes("weights/e0v0/table")).items()
            }
            assert lies == {"trainer/0": [(0, 0)], "trainer/1": [(4, 0)]}
            version, whole, part, _ = await plain.run.call_one(
                _example(), "read", "on_hosts", "table"
            )
            assert version == "e0v0"
            assert torch.equal(whole, TABLE)
            assert torch.equal(part, TABLE[2:6])
            assert await store.drop(V0)
            assert await client.keys() == []
            await stop_store("on_hosts")

    before = descendants()
    asyncio.run(scenario())
    assert not wait_until_gone(descendants() - before)


def test_two_volumes_on_a_host_are_refused_and_the_next_store_starts() -> None:
    async def scenario() -> None:
        prepare_controller()
        async with _on_hosts("store", ["trainer/0"] * 2) as volumes:
            with pytest.raises(Exception, match=r"2 volumes .* are on \['trainer/0'\]"):
                await start_store(volumes, "twice")
        async with _on_hosts("store", HOSTS) as volumes:
            await start_store(volumes, "once")
            store = TorchStoreWeightStore("once")
            piece = WeightPiece("table", (8, 6), (0, 0), TABLE, torch.float32)
            part = await store.write(store.stage(V1, 0, [piece]))
            await store.commit(build_manifest(V1, store.transport, [part]))
            assert torch.equal((await read_all(store))[1]["table"], TABLE)
            await stop_store("once")

    before = descendants()
    asyncio.run(scenario())
    assert not wait_until_gone(descendants() - before)
