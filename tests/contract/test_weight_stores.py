"""The same claims for every way weights travel."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from forge_trainer.config import WeightsConfig
from forge_trainer.errors import AlreadyPublishedError, WeightsError
from forge_trainer.functional.pieces.manifests import build_manifest, tensors_of
from forge_trainer.pieces import Manifest, StoreAddress, Verify, WeightPiece, WeightsVersion
from forge_trainer.processes.meshes import prepare_controller, running_mesh, start_store, stop_store
from forge_trainer.protocols import WeightStore
from forge_trainer.weights.memory import MemoryWeightStore
from forge_trainer.weights.shared_memory.folder import shared_folder
from forge_trainer.weights.shared_memory.store import SharedMemoryWeightStore
from forge_trainer.weights.staging import PieceCopier
from forge_trainer.weights.stores import open_store
from forge_trainer.weights.torchstore.store import TorchStoreWeightStore
from forge_trainer.weights.torchstore.volumes import Volumes
from tests.weights import V0, V1, V2, model, pieces_of, publish, read_all

RANKS = 2


@dataclass
class Subject:
    """A place for weights, which several stores may be opened over, and the loop they live on."""

    address: StoreAddress
    open: Callable[[Verify], WeightStore]
    runner: asyncio.Runner

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(coroutine)

    async def traces(self, store: WeightStore) -> set[str]:
        """Everything that is held for versions: keys, or segments in use."""
        if isinstance(store, MemoryWeightStore):
            return set(store._pieces)
        if isinstance(store, SharedMemoryWeightStore):
            files = Path(self.address.location, "segments").iterdir()
            in_use = {path.name for path in files if path.read_bytes()[8:16] != bytes(8)}
            return in_use | {path.name for path in Path(self.address.location, "leases").iterdir()}
        client = await cast(TorchStoreWeightStore, store).client()
        keys = {key for key in await client.keys() if not key.startswith("manifests.")}
        return keys | set(await Volumes(client).locations())

    async def flip_byte(self, store: WeightStore, manifest: Manifest, name: str) -> None:
        """Damage the first piece of a tensor where it lies."""
        piece = tensors_of(manifest)[name].pieces[0]
        location = manifest.parts[piece.part].location
        if isinstance(store, MemoryWeightStore):
            data = store._pieces[location][piece.index]
            data.view(torch.uint8).view(-1)[5] ^= 1
        elif isinstance(store, SharedMemoryWeightStore):
            async with store.reading(manifest.version) as reading:
                (view,) = await reading._source.fetch([piece])
                view.view(torch.uint8).view(-1)[5] ^= 1
        else:
            volumes = Volumes(await cast(TorchStoreWeightStore, store).client())
            like = torch.empty(piece.record.shape, dtype=piece.record.torch_dtype).view(-1)
            data = await volumes.read(location, [piece.index], like)
            data.view(torch.uint8)[5] ^= 1
            shapes = {piece.index: piece.record.shape}
            await volumes.write(location.rpartition("@")[0], data, shapes)


@contextlib.asynccontextmanager
async def _place(transport: str) -> AsyncIterator[tuple[StoreAddress, Any]]:
    if transport == "torchstore":
        prepare_controller()
        async with running_mesh("store", num_processes=1, cpu_threads=1) as mesh:
            await start_store(mesh, "contract")
            yield StoreAddress("torchstore", "contract"), None
            await stop_store("contract")
    elif transport == "shared_memory":
        with shared_folder() as folder:
            yield StoreAddress("shared_memory", str(folder)), None
    else:
        # One process, one place: all who open it share it.
        yield StoreAddress("memory", ""), MemoryWeightStore()


@pytest.fixture(scope="module", params=["memory", "shared_memory", "torchstore"])
def place(request: pytest.FixtureRequest) -> Iterator[Subject]:
    with asyncio.Runner() as runner:
        running = _place(request.param)
        address, shared = runner.run(running.__aenter__())

        def open_one(verify: Verify = "full") -> WeightStore:
            if shared is not None:
                shared._copier = PieceCopier(verify)
                return cast(WeightStore, shared)
            return open_store(address, WeightsConfig(verify=verify, lease_timeout_s=1.0))

        yield Subject(address, open_one, runner)
        runner.run(running.__aexit__(None, None, None))


@pytest.fixture
def subject(place: Subject) -> Iterator[Subject]:
    """Empty before and after."""
    yield place

    async def empty() -> None:
        store = place.open("full")
        for version in await store.versions():
            assert await store.drop(version)
        await store.clean()
        assert await place.traces(store) == set()

    place.run(empty())


def _by_rank(fill: float = 0.0) -> list[list[WeightPiece]]:
    return [pieces_of(model(fill), rank, RANKS) for rank in range(RANKS)]


def _equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        torch.equal(found[name], wanted[name]) and found[name].dtype == wanted[name].dtype
        for name in wanted
    )


def test_a_version_exists_once_its_manifest_does(subject: Subject) -> None:
    async def scenario() -> None:
        store, reader = subject.open("full"), subject.open("full")
        with pytest.raises(WeightsError, match="no weights are published yet"):
            await read_all(reader)
        parts = [
            await store.write(store.stage(V0, rank, pieces))
            for rank, pieces in enumerate(_by_rank())
        ]
        assert await reader.versions() == []
        with pytest.raises(WeightsError, match=r"e0v0 do not exist; held: \[\]"):
            await read_all(reader, V0)
        await store.commit(build_manifest(V0, store.transport, parts))
        assert await reader.versions() == [V0]
        version, found = await read_all(reader)
        assert version == V0
        assert _equal(found, model())
        with pytest.raises(WeightsError, match=r"e1v0 do not exist; held: \['e0v0'\]"):
            await read_all(reader, WeightsVersion(1, 0))

    subject.run(scenario())


def test_a_version_is_committed_once(subject: Subject) -> None:
    async def scenario() -> None:
        store = subject.open("full")
        manifest = await publish(store, V0, _by_rank())
        again = [store.stage(V0, rank, pieces) for rank, pieces in enumerate(_by_rank(5.0))]
        parts = [await store.write(one) for one in again]
        for second in (manifest, build_manifest(V0, store.transport, parts)):
            with pytest.raises(AlreadyPublishedError, match="e0v0 exist already; they stay"):
                await store.commit(second)
        for one in again:
            await store.abandon(one)
        assert _equal((await read_all(store))[1], model())

    subject.run(scenario())


def test_readers_take_the_newest_or_the_one_they_name(subject: Subject) -> None:
    async def scenario() -> None:
        store = subject.open("full")
        for step, version in enumerate((V0, V1, WeightsVersion(1, 0))):
            await publish(store, version, _by_rank(fill=float(step)))
        assert (await read_all(store))[0] == WeightsVersion(1, 0)
        for step, version in enumerate((V0, V1)):
            assert _equal((await read_all(store, version))[1], model(float(step)))

    subject.run(scenario())


def test_a_model_is_loaded_in_place(subject: Subject) -> None:
    async def scenario() -> None:
        store = subject.open("full")
        live = {name: torch.zeros_like(tensor) for name, tensor in model().items()}
        pointers = {name: tensor.data_ptr() for name, tensor in live.items()}
        for step, version in enumerate((V0, V1)):
            await publish(store, version, _by_rank(fill=float(step)))
            async with store.reading(version) as reading:
                await reading.load_into(live)
            assert _equal(live, model(float(step)))
        assert {name: tensor.data_ptr() for name, tensor in live.items()} == pointers

    subject.run(scenario())


def test_a_model_that_does_not_fit_is_left_alone(subject: Subject) -> None:
    fits = {name: torch.full_like(tensor, 7) for name, tensor in model().items()}
    unfit = {
        r"missing \['more'\]": fits | {"more": torch.full((2,), 7.0)},
        r"extra \['vector'\]": {k: v for k, v in fits.items() if k != "vector"},
        r"different \[.matrix": fits | {"matrix": torch.full((7, 6), 7.0)},
        r"different \[.vector": fits | {"vector": torch.full((5,), 7.0, dtype=torch.float64)},
    }

    async def scenario() -> None:
        store = subject.open("full")
        await publish(store, V0, _by_rank())
        for message, live in unfit.items():
            async with store.reading() as reading:
                with pytest.raises(WeightsError, match=f"e0v0 do not fit.*{message}"):
                    await reading.load_into(live)
            assert all(bool((tensor == 7).all()) for tensor in live.values())

    subject.run(scenario())


@pytest.mark.parametrize("name", ["matrix", "vector", "buffer"])
def test_a_flipped_byte_is_caught_with_the_tensors_name(subject: Subject, name: str) -> None:
    async def scenario() -> None:
        store, reader = subject.open("full"), subject.open("full")
        manifest = await publish(store, V0, _by_rank())
        await subject.flip_byte(store, manifest, name)
        live = {key: torch.full_like(tensor, 7) for key, tensor in model().items()}
        async with reader.reading() as reading:
            with pytest.raises(WeightsError, match=f"e0v0: checksum of {name} at"):
                await reading.load_into(live)
            with pytest.raises(WeightsError, match=f"e0v0: checksum of {name} at"):
                await reading.read(name)
            others = [key for key in model() if key != name]
            for other in others:
                assert torch.equal(await reading.read(other), model()[other])
        assert all(bool((tensor == 7).all()) for tensor in live.values())

    subject.run(scenario())


def test_verification_can_be_switched_off(subject: Subject) -> None:
    async def scenario() -> None:
        store = subject.open("off")
        manifest = await publish(store, V0, _by_rank())
        assert all(checksums == b"" for part in manifest.parts for checksums in part.checksums)
        await subject.flip_byte(store, manifest, "vector")
        _, found = await read_all(store)
        assert not torch.equal(found["vector"], model()["vector"])

    subject.run(scenario())


def test_readers_may_ask_for_a_slice(subject: Subject) -> None:
    matrix = model()["matrix"]

    async def scenario() -> None:
        store = subject.open("full")
        await publish(store, V0, _by_rank())
        async with store.reading() as reading:
            for offsets, shape in (((0, 0), (6, 7)), ((2, 1), (3, 4)), ((5, 6), (1, 1))):
                rows, columns = (slice(o, o + s) for o, s in zip(offsets, shape, strict=True))
                found = await reading.read("matrix", offsets=offsets, shape=shape)
                assert torch.equal(found, matrix[rows, columns])
            beyond: list[tuple[tuple[int, ...], tuple[int, ...]]]
            beyond = [((4, 0), (3, 7)), ((-1, 0), (1, 1)), ((0,), (1,)), ((0, 0), (6,))]
            for start, size in beyond:
                with pytest.raises(WeightsError, match="e0v0: matrix of shape .* no rectangle"):
                    await reading.read("matrix", offsets=start, shape=size)
            with pytest.raises(WeightsError, match="e0v0 have no tensor experts"):
                await reading.read("experts")

    subject.run(scenario())


def test_a_slice_verifies_only_the_pieces_it_touches(subject: Subject) -> None:
    async def scenario() -> None:
        store = subject.open("full")
        manifest = await publish(store, V0, _by_rank())
        await subject.flip_byte(store, manifest, "matrix")
        async with store.reading() as reading:
            lower = await reading.read("matrix", offsets=(3, 0), shape=(3, 7))
            assert torch.equal(lower, model()["matrix"][3:])
            with pytest.raises(WeightsError, match="checksum of matrix"):
                await reading.read("matrix", offsets=(2, 0), shape=(2, 7))

    subject.run(scenario())


def test_experts_that_ranks_split_by_name_are_one_version(subject: Subject) -> None:
    experts = {f"experts.{i}.weight": torch.full((2, 3), float(i)) for i in range(4)}

    async def scenario() -> None:
        store = subject.open("full")
        by_rank = [
            pieces_of({n: t for i, (n, t) in enumerate(experts.items()) if i % RANKS == rank})
            for rank in range(RANKS)
        ]
        await publish(store, V0, by_rank)
        assert _equal((await read_all(store))[1], experts)
        async with store.reading() as reading:
            assert torch.equal(
                await reading.read("experts.3.weight", offsets=(1, 0), shape=(1, 3)),
                experts["experts.3.weight"][1:],
            )

    subject.run(scenario())


def test_a_tied_tensor_is_stored_once_and_read_under_any_name(subject: Subject) -> None:
    table = torch.arange(6.0).reshape(3, 2)
    piece = WeightPiece("embed", (3, 2), (0, 0), table, torch.float32, tied=("head",))

    async def scenario() -> None:
        store = subject.open("full")
        await publish(store, V0, [[piece]])
        async with store.reading() as reading:
            assert torch.equal(await reading.read("head"), table)
            both = {"embed": torch.zeros(3, 2), "head": torch.zeros(3, 2)}
            await reading.load_into(both)
            assert torch.equal(both["head"], table)
            tied = {"head": torch.zeros(3, 2)}
            await reading.load_into(tied)
            assert torch.equal(tied["head"], table)

    subject.run(scenario())


def test_parameters_are_cast_and_buffers_are_not(subject: Subject) -> None:
    weight, buffer = torch.tensor([1.0, 1 / 3]), torch.tensor([2**40])

    async def scenario() -> None:
        store = subject.open("full")
        pieces = [
            WeightPiece("w", (2,), (0,), weight, torch.bfloat16),
            WeightPiece("b", (1,), (0,), buffer, torch.int64),
        ]
        await publish(store, V0, [pieces])
        _, found = await read_all(store)
        assert _equal(found, {"w": weight.bfloat16(), "b": buffer})
        # Finite as float32, not as what is published.
        huge = WeightPiece("w", (1,), (0,), torch.tensor([3.4e38]), torch.bfloat16)
        with pytest.raises(WeightsError, match="e0v1: w is not finite; not published"):
            store.stage(V1, 0, [huge])

    subject.run(scenario())


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(
    subject: Subject, bad: float, in_place: bool
) -> None:
    live = torch.tensor([3e38, 3e38, 3e38])
    piece = WeightPiece("w", (3,), (0,), live, torch.float32)
    largest = torch.finfo(torch.float64).max
    complex_ = torch.complex(*torch.full((2, 1), largest, dtype=torch.float64))
    huge = WeightPiece("z", (1,), (0,), complex_, torch.complex128)

    async def scenario() -> None:
        store = subject.open("full")
        # Their sum overflows, or their absolute value, but they are finite.
        await publish(store, V0, [[piece, huge]])
        broken = live.clone()
        broken[1] = bad
        bad_piece = WeightPiece("w", (3,), (0,), broken, torch.float32)
        if in_place:
            staged = store.stage(V1, 0, [bad_piece], in_place=True)
            with pytest.raises(WeightsError, match="e0v1: w is not finite"):
                await store.write(staged)
            await store.abandon(staged)
        else:
            with pytest.raises(WeightsError, match="e0v1: w is not finite"):
                store.stage(V1, 0, [bad_piece])
        assert torch.equal((await read_all(store))[1]["w"], live)

    subject.run(scenario())


def test_a_copy_is_of_the_moment_of_staging(subject: Subject) -> None:
    async def scenario() -> None:
        store = subject.open("full")
        live = torch.zeros(4)
        piece = WeightPiece("w", (4,), (0,), live, torch.float32)
        staged = store.stage(V0, 0, [piece])
        live.fill_(1)
        part = await store.write(staged)
        live.fill_(2)
        await store.commit(build_manifest(V0, store.transport, [part]))
        assert torch.equal((await read_all(store))[1]["w"], torch.zeros(4))
        staged = store.stage(V1, 0, [piece], in_place=True)
        live.fill_(3)
        part = await store.write(staged)
        live.fill_(4)
        await store.commit(build_manifest(V1, store.transport, [part]))
        assert torch.equal((await read_all(store))[1]["w"], torch.full((4,), 3.0))

    subject.run(scenario())


def test_a_version_that_is_read_is_hidden_first_and_dropped_later(subject: Subject) -> None:
    async def scenario() -> None:
        store, reader = subject.open("full"), subject.open("full")
        await publish(store, V0, _by_rank())
        await publish(store, V1, _by_rank(1.0))
        async with reader.reading(V0) as reading:
            assert await store.num_readers() == 1
            assert not await store.drop(V0)
            assert await store.versions() == [V1]
            with pytest.raises(WeightsError, match="e0v0 do not exist"):
                await read_all(subject.open("full"), V0)
            # Whatever is published meanwhile does not touch it.
            await publish(store, V2, _by_rank(2.0))
            live = {name: torch.zeros_like(tensor) for name, tensor in model().items()}
            await reading.load_into(live)
            assert _equal(live, model())
            assert not await store.drop(V0)
        assert await store.num_readers() == 0
        assert await store.drop(V0)
        assert not any("e0v0" in trace for trace in await subject.traces(store))

    subject.run(scenario())


def test_a_reader_that_fails_ends_its_lease(subject: Subject) -> None:
    async def scenario() -> None:
        store = subject.open("full")
        await publish(store, V0, _by_rank())
        with pytest.raises(ZeroDivisionError):
            async with store.reading():
                raise ZeroDivisionError
        assert await store.num_readers() == 0
        assert await store.drop(V0)

    subject.run(scenario())


def test_an_abandoned_version_leaves_nothing(subject: Subject) -> None:
    async def scenario() -> None:
        store = subject.open("full")
        await publish(store, V0, _by_rank())
        before = await subject.traces(store)
        staged = store.stage(V1, 0, _by_rank(1.0)[0])
        await store.write(staged)
        assert await subject.traces(store) > before
        await store.abandon(staged)
        assert await subject.traces(store) == before
        assert _equal((await read_all(store))[1], model())

    subject.run(scenario())


def test_an_attempt_that_is_abandoned_late_leaves_the_next_one_alone(subject: Subject) -> None:
    async def scenario() -> None:
        store = subject.open("off")
        first = store.stage(V0, 0, _by_rank(9.0)[0])
        await store.write(first)
        # The same version is tried again, and published.
        await publish(store, V0, _by_rank())
        await store.write(first)
        assert _equal((await read_all(store))[1], model())
        await store.abandon(first)
        assert _equal((await read_all(store))[1], model())
        await publish(store, V1, _by_rank(1.0))
        assert _equal((await read_all(store, V0))[1], model())

    subject.run(scenario())


def test_what_a_dead_trainer_left_is_cleaned_and_what_it_published_stays(subject: Subject) -> None:
    async def scenario() -> None:
        dead = subject.open("full")
        await publish(dead, V0, _by_rank())
        before = await subject.traces(dead)
        await dead.write(dead.stage(V1, 0, _by_rank(1.0)[0]))
        store = subject.open("full")
        await store.clean()
        assert await subject.traces(store) == before
        assert _equal((await read_all(store))[1], model())
        await publish(store, WeightsVersion(1, 0), _by_rank(2.0))
        assert await store.drop(V0)
        assert len(await subject.traces(store)) == len(before)

    subject.run(scenario())


def test_memory_does_not_grow(subject: Subject) -> None:
    """Two versions stay and a third is made, over and over; a reader follows."""

    async def scenario() -> None:
        store, reader = subject.open("full"), subject.open("full")
        live = {name: torch.zeros_like(tensor) for name, tensor in model().items()}
        most = 0
        for step in range(12):
            version = WeightsVersion(0, step)
            await publish(store, version, _by_rank(float(step)))
            async with reader.reading() as reading:
                await reading.load_into(live)
            assert _equal(live, model(float(step)))
            for old in (await store.versions())[:-2]:
                assert await store.drop(old)
            most = max(most, len(await subject.traces(store)))
        in_one = len(await subject.traces(store)) // 2
        assert most == 2 * in_one
        if subject.address.transport == "shared_memory":
            files = list(Path(subject.address.location, "segments").iterdir())
            assert len(files) == 3 * RANKS

    subject.run(scenario())


def test_a_pull_into_other_tensors_is_planned_anew(subject: Subject) -> None:
    """Views come and go at the same address."""
    square = torch.arange(9.0).reshape(3, 3)

    async def scenario() -> None:
        store = subject.open("full")
        await publish(store, V0, [[WeightPiece("w", (3, 3), (0, 0), square, torch.float32)]])
        memory = torch.zeros(9)
        for _ in range(20):
            async with store.reading() as reading:
                await reading.load_into({"w": memory.view(3, 3)})
                assert torch.equal(memory.view(3, 3), square)
                await reading.load_into({"w": memory.view(3, 3).T})
                assert torch.equal(memory.view(3, 3).T, square)
                with pytest.raises(WeightsError, match="different"):
                    await reading.load_into({"w": memory.view(9)})

    subject.run(scenario())


def test_pulls_at_once_in_one_process_do_not_mix(subject: Subject) -> None:
    async def scenario() -> None:
        store = subject.open("off")
        versions = (V0, V1, V2)
        for step, version in enumerate(versions):
            await publish(store, version, _by_rank(float(step)))

        async def load(step: int, version: WeightsVersion) -> None:
            live = {name: torch.zeros_like(tensor) for name, tensor in model().items()}
            async with store.reading(version) as reading:
                await asyncio.gather(reading.load_into(live), reading.read("matrix"))
            assert _equal(live, model(float(step)))

        for _ in range(5):
            await asyncio.gather(*(load(step, version) for step, version in enumerate(versions)))

    subject.run(scenario())
