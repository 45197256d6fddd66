"""Comparing weights: hand-made sources, the ones that ship, and a checkpoint read on its own."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from apps.weights import main as weights_app
from forge_trainer.config import WeightsConfig
from forge_trainer.controller.in_process import start_in_process_trainer
from forge_trainer.errors import CheckpointError, ConfigError, TornWeightsError, WeightsError
from forge_trainer.functional.pieces import differences
from forge_trainer.functional.pieces.differences import ValueDifference, difference
from forge_trainer.functional.pieces.manifests import checksum, describe_tensor
from forge_trainer.pieces import TensorFacts
from forge_trainer.protocols import WeightsReading
from forge_trainer.run.compare import Comparison, compare_weights
from forge_trainer.run.weight_sources import (
    GeneratorWeights,
    HeldWeights,
    PublishedWeights,
    checkpoint_format,
    read_checkpoint,
)
from tests.unit.conftest import CONFIG, GOOD, Bench
from tests.weights import model


class Source:
    """Keeps `WeightSource`, and remembers what was read."""

    def __init__(
        self,
        label: str,
        tensors: Mapping[str, Tensor],
        ties: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        ties = ties or {}
        self.label = label
        self._held = HeldWeights(label, {n: (t, ties.get(n, ())) for n, t in tensors.items()})
        self.was_read: list[str] = []

    async def checksums(self) -> Mapping[str, TensorFacts]:
        return await self._held.checksums()

    async def read(self, name: str) -> Tensor:
        self.was_read.append(name)
        return await self._held.read(name)


def _compare(one: Source, other: Source, first: int = 10) -> Comparison:
    (comparison,) = asyncio.run(compare_weights(one, [other], first=first))
    return comparison


def _explained(comparison: Comparison) -> dict[str, str]:
    return {one.name: comparison.explain(one) for one in comparison.differences}


def test_equal_weights_have_no_differences_and_are_not_read() -> None:
    one, other = Source("a", model()), Source("b", model())
    comparison = _compare(one, other)
    assert (comparison.num_tensors, comparison.differences) == (4, ())
    assert one.was_read == other.was_read == []


def test_one_flipped_element_is_found() -> None:
    changed = model()
    changed["matrix"][3, 4] += 0.5
    one, other = Source("a", model()), Source("b", changed)
    comparison = _compare(one, other)
    assert [found.name for found in comparison.differences] == ["matrix"]
    assert comparison.differences[0].values == ValueDifference(42, 1, 0.5)
    assert _explained(comparison) == {"matrix": "1 of 42 elements, at most by 0.5"}
    assert one.was_read == other.was_read == ["matrix"]


def test_missing_tensors_shapes_and_dtypes_are_told_without_reading() -> None:
    changed = model()
    changed["extra"] = changed.pop("number")
    changed["matrix"] = changed["matrix"].reshape(7, 6)
    changed["vector"] = changed["vector"].bfloat16()
    one, other = Source("a", model()), Source("b", changed)
    assert _explained(_compare(one, other)) == {
        "extra": "only in b",
        "number": "only in a",
        "matrix": "shape (6, 7) in a, (7, 6) in b",
        "vector": "dtype float32 in a, bfloat16 in b",
    }
    assert one.was_read == other.was_read == []


def test_only_the_first_differing_tensors_are_read_in_the_order_of_layers() -> None:
    names = [f"layers.{i}.weight" for i in range(12)]
    one = Source("a", {name: torch.zeros(2) for name in names})
    other = Source("b", {name: torch.ones(2) for name in reversed(names)})
    comparison = _compare(one, other, first=3)
    assert [found.name for found in comparison.differences] == names
    assert one.was_read == other.was_read == names[:3]
    assert _explained(comparison)[names[3]] == "other values"


EMBEDDING, HEAD = "embed.weight", "head.weight"


@pytest.mark.parametrize(
    ("names", "ties"),
    [
        ([EMBEDDING], {EMBEDDING: (HEAD,)}),
        ([HEAD], {HEAD: (EMBEDDING,)}),
        ([EMBEDDING], {}),
        ([HEAD], {}),
        ([EMBEDDING, HEAD], {}),
    ],
    ids=["same", "other name first", "one name", "other name", "both apart"],
)
def test_a_tied_tensor_answers_to_all_its_names(
    names: list[str], ties: dict[str, tuple[str, ...]]
) -> None:
    tied = Source("a", {EMBEDDING: torch.ones(3)}, {EMBEDDING: (HEAD,)})
    assert _compare(tied, Source("b", dict.fromkeys(names, torch.ones(3)), ties)).differences == ()
    last = {name: torch.ones(3) for name in names[:-1]} | {names[-1]: torch.zeros(3)}
    (found,) = _compare(tied, Source("b", last, ties)).differences
    assert found.name == (EMBEDDING if ties else names[-1])
    assert found.values == ValueDifference(3, 3, 1.0)
    (found,) = _compare(Source("b", last, ties), tied).differences
    assert found.name == names[-1]
    assert found.values == ValueDifference(3, 3, 1.0)


def test_weights_that_change_while_they_are_compared_are_an_error() -> None:
    class Moving(Source):
        async def read(self, name: str) -> Tensor:
            return await super().read(name) + 1

    moving = Moving("live", {"x": torch.ones(2)})
    with pytest.raises(WeightsError, match="live: x changed while it was compared"):
        _compare(Source("a", {"x": torch.zeros(2)}), moving)


def test_differences_are_those_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal numbers of other bytes count, and a nan is never smaller than a number."""
    monkeypatch.setattr(differences, "CHUNK_ELEMENTS", 2)
    zeros = torch.zeros(2, 3)
    assert difference(zeros, -zeros) == ValueDifference(6, 6, 0.0)
    other = torch.tensor([[0.0, 0.25, 0.0], [0.0, 0.0, -2.0]])
    assert difference(zeros, other.clone()) == ValueDifference(6, 2, 2.0)
    other[0, 0] = math.nan
    assert math.isnan(difference(zeros, other).largest)
    assert math.isnan(difference(other, zeros).largest)
    assert difference(other, other.clone()) == ValueDifference(6, 0, 0.0)
    assert difference(
        torch.tensor([2.0], dtype=torch.bfloat16), torch.tensor([3.0]).bfloat16()
    ) == (ValueDifference(1, 1, 1.0))
    assert difference(torch.tensor(1), torch.tensor(5)) == ValueDifference(1, 1, 4.0)
    assert difference(torch.tensor(2**60), torch.tensor(2**60 + 1)) == ValueDifference(1, 1, 1.0)
    assert difference(torch.tensor(True), torch.tensor(False)) == ValueDifference(1, 1, 1.0)
    assert difference(torch.tensor(3.0 + 1j), torch.tensor(4j)).largest == pytest.approx(18**0.5)


def _against_published(bench: Bench) -> Comparison:
    async def compare() -> Comparison:
        async with bench.store.reading() as reading:
            held: WeightsReading = reading
            (found,) = await compare_weights(
                PublishedWeights(held), [GeneratorWeights(bench.generator)]
            )
        return found

    comparison: Comparison = bench.run(compare())
    return comparison


def test_a_generator_is_compared_with_what_is_published(bench: Bench) -> None:
    bench.run(bench.trainer.train_step(GOOD, loss="grpo"))
    ref = bench.run(bench.trainer.push_weights())
    before = _against_published(bench)
    explained = _explained(before)
    assert explained.keys() >= {
        "model.embed_tokens.weight",
        "model.layers.1.mlp.up_proj.weight",
        "model.norm.weight",
    }
    assert all("elements, at most by" in text for text in list(explained.values())[:10])
    bench.run(bench.generator.pull_weights(ref))
    after = _against_published(bench)
    assert (after.num_tensors, after.differences) == (ref.num_tensors, ())


def test_a_generator_tells_what_it_runs_on(bench: Bench) -> None:
    bench.run(bench.trainer.train_step(GOOD, loss="grpo"))
    ref = bench.run(bench.trainer.push_weights())
    bench.run(bench.generator.pull_weights(ref))
    found = bench.run(bench.generator.weight_checksums())
    assert found.version == ref.version
    live = bench.generator._backend.tensors
    assert found.tensors.keys() == live.keys()
    embedding = found.tensors["model.embed_tokens.weight"]
    assert embedding.tied == ("lm_head.weight",)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensor = bench.run(bench.generator.read_weight(name))
        assert checksum(tensor).hex() == embedding.checksum
    tensor.zero_()
    assert live["model.embed_tokens.weight"].abs().sum() > 0, "it is a copy"
    with pytest.raises(WeightsError, match=r"no tensor 'model\.nothing'; weight_checksums names"):
        bench.run(bench.generator.read_weight("model.nothing"))


def test_a_generator_with_torn_weights_tells_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = bench.run(bench.trainer.push_weights())

    def tear(*args: object) -> None:
        raise RuntimeError("half way")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "_foreach_copy_", tear)
        with pytest.raises(TornWeightsError):
            bench.run(bench.generator.pull_weights(ref))
    for call in (bench.generator.weight_checksums, lambda: bench.generator.read_weight("x")):
        with pytest.raises(WeightsError, match="half way"):
            bench.run(call())
    bench.run(bench.generator.pull_weights(ref))
    assert bench.run(bench.generator.weight_checksums()).version == ref.version


@pytest.mark.parametrize("model_name", ["tiny_qwen3", "tiny_llama"])
def test_a_checkpoint_and_an_export_hold_what_is_published(
    model_name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """In bfloat16; Llama's q and k change their order of rows on the way."""
    model_dir: Path = request.getfixturevalue(model_name)
    dtype = torch.bfloat16

    async def scenario() -> None:
        trainer = await start_in_process_trainer(
            CONFIG,
            model_dir=model_dir,
            checkpoint_folder=tmp_path,
            weights=WeightsConfig(dtype="bfloat16"),
        )
        await trainer.train_step(GOOD, loss="grpo")
        await trainer.save("dcp", weights_only=True)
        await trainer.save("export", format="hf")
        store = trainer._ranks._worker._store  # type: ignore[attr-defined]
        await trainer.push_weights()
        await trainer.close()
        sources = {
            label: HeldWeights(
                label, await read_checkpoint(path, model_dir=model_dir, trainer=CONFIG, dtype=dtype)
            )
            for label, path in {
                "dcp": tmp_path / "dcp",
                "export": tmp_path / "export",
                "model": model_dir,
            }.items()
        }
        async with store.reading() as reading:
            found = await compare_weights(PublishedWeights(reading), list(sources.values()))
        assert [len(one.differences) for one in found[:2]] == [0, 0]
        facts = await sources["dcp"].checksums()
        assert found[0].num_tensors == len(facts) > 20
        assert {one.dtype for one in facts.values()} == {"bfloat16"}
        assert "model.layers.0.self_attn.q_proj.weight" in _explained(found[2])

    asyncio.run(scenario())


def test_a_damaged_export_is_refused(tmp_path: Path, tiny_qwen3: Path) -> None:
    async def export() -> None:
        trainer = await start_in_process_trainer(
            CONFIG, model_dir=tiny_qwen3, checkpoint_folder=tmp_path
        )
        await trainer.save("export", format="hf")
        await trainer.close()

    asyncio.run(export())
    path = tmp_path / "export"
    file = next(path.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{file.name} is damaged"):
        asyncio.run(
            read_checkpoint(path, model_dir=tiny_qwen3, trainer=CONFIG, dtype=torch.float32)
        )


def test_what_is_no_checkpoint_is_a_config_error(tmp_path: Path, tiny_qwen3: Path) -> None:
    assert checkpoint_format(tiny_qwen3) == "hf"
    with pytest.raises(ConfigError, match="--checkpoint: checkpoint .*none does not exist"):
        checkpoint_format(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"lacks forge_trainer\.json, so it is incomplete"):
        checkpoint_format(tmp_path)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match="checkpoint .*file is not a directory"):
        checkpoint_format(file)


def test_a_model_of_another_kind_is_told_by_the_option_that_gave_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "other"}')
    options = ["--config", "configs/grpo_tiny.yaml", "--checkpoint", str(tmp_path)]
    assert weights_app.main(["verify", *options]) == 2
    assert f"--checkpoint {tmp_path}: model.path: is a 'other' model" in capsys.readouterr().err


def test_facts_of_a_tensor_do_not_depend_on_its_memory() -> None:
    matrix = torch.arange(6.0).reshape(2, 3)
    assert describe_tensor(matrix.T.contiguous().T) == describe_tensor(matrix)
    assert describe_tensor(matrix.reshape(3, 2)).checksum == describe_tensor(matrix).checksum
