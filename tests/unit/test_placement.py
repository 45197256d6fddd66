"""Who gets which devices, hosts and threads, with a faked inventory."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from forge_trainer.config import (
    GeneratorConfig,
    GrpoConfig,
    LaunchConfig,
    ParallelConfig,
    PlacementConfig,
    Role,
    TrainerConfig,
)
from forge_trainer.errors import ConfigError
from forge_trainer.processes.hosts.inventory import find_inventory, visible
from forge_trainer.processes.hosts.launch import process_environment
from forge_trainer.processes.hosts.placement import MeshPlan, Placement, describe, plan_placement
from forge_trainer.types import Gpu, HostInventory

LOCAL = LaunchConfig()
GENERATOR = GeneratorConfig()


def _inventory(gpus: int, *, cores: int = 16) -> HostInventory:
    return HostInventory(tuple(Gpu(str(i)) for i in range(gpus)), cores)


def _plan(
    gpus: int,
    *,
    ranks: int = 1,
    reference: int | None = None,
    launch: LaunchConfig = LOCAL,
    placement: dict[str, Any] | None = None,
    generator: GeneratorConfig = GENERATOR,
) -> Placement:
    trainers: dict[Role, TrainerConfig] = {"trainer": TrainerConfig(num_ranks=ranks)}
    if reference is not None:
        trainers["reference"] = TrainerConfig(num_ranks=reference, trainable=False)
    given = PlacementConfig.model_validate(placement or {})
    return plan_placement(trainers, generator, given, launch, _inventory(gpus))


def _devices(plans: Placement) -> dict[str, list[int]]:
    return {role: list(plan.devices) for role, plan in plans.items()}


def test_meshes_get_devices_in_order_each_its_own() -> None:
    plans = _plan(8, ranks=4, reference=2)
    assert _devices(plans) == {"trainer": [0, 1, 2, 3], "reference": [4, 5], "generator": [6]}
    assert process_environment(plans["reference"], LOCAL) == {
        "CUDA_VISIBLE_DEVICES": "4,5",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    }


def test_a_generator_on_vllm_finds_what_that_wants() -> None:
    plans = _plan(4, ranks=2, generator=GeneratorConfig(backend="vllm", cpu_threads=3))
    assert process_environment(plans["generator"], LOCAL)["OMP_NUM_THREADS"] == "3"
    assert "OMP_NUM_THREADS" not in process_environment(plans["trainer"], LOCAL)


def test_the_users_own_allocator_settings_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")
    environment = process_environment(_plan(2)["trainer"], LOCAL)
    assert environment["PYTORCH_ALLOC_CONF"] == "max_split_size_mb:512"


def test_meshes_that_are_colocated_share() -> None:
    plans = _plan(4, ranks=4, placement={"colocate": ["trainer", "generator"]})
    assert _devices(plans) == {"trainer": [0, 1, 2, 3], "generator": [0]}
    plans = _plan(5, ranks=2, reference=4, placement={"colocate": ["reference", "trainer"]})
    assert _devices(plans) == {"trainer": [0, 1], "reference": [0, 1, 2, 3], "generator": [4]}


def test_who_is_colocated_goes_where_the_other_was_put() -> None:
    shared = {"colocate": ["trainer", "generator"], "devices": {"generator": [2]}}
    assert _devices(_plan(4, ranks=4, placement=shared)) == {
        "trainer": [2, 0, 1, 3],
        "generator": [2],
    }


def test_on_other_hosts_the_same_numbers_are_other_devices() -> None:
    launch = LaunchConfig(kind="slurm", hosts={"trainer": 1, "generator": 1}, gpus_per_host=2)
    named = {"devices": {"trainer": [0, 1], "generator": [0]}}
    assert _devices(_plan(2, ranks=2, launch=launch, placement=named)) == named["devices"]


def test_devices_can_be_named() -> None:
    plans = _plan(4, ranks=2, placement={"devices": {"trainer": [3, 1]}})
    assert _devices(plans) == {"trainer": [3, 1], "generator": [0]}


@settings(max_examples=60, deadline=None)
@given(
    gpus=st.integers(1, 9),
    ranks=st.integers(1, 6),
    reference=st.one_of(st.none(), st.integers(1, 3)),
    shared=st.sampled_from([[], ["trainer", "generator"], ["trainer", "reference", "generator"]]),
)
def test_devices_are_disjoint_in_every_layout_or_it_is_refused(
    gpus: int, ranks: int, reference: int | None, shared: list[str]
) -> None:
    if reference is None:
        shared = [role for role in shared if role != "reference"]
    wanted = {"trainer": ranks, "reference": reference or 0, "generator": 1}
    needed = max((wanted[role] for role in shared), default=0)
    needed += sum(number for role, number in wanted.items() if role not in shared)
    asked: dict[str, Any] = {"ranks": ranks, "reference": reference}
    asked["placement"] = {"colocate": shared}
    if needed > gpus:
        with pytest.raises(ConfigError, match="GPUs on each host of the trainer do not fit"):
            _plan(gpus, **asked)
        return
    plans = _plan(gpus, **asked)
    for one, other in itertools.combinations(plans.values(), 2):
        if not {one.role, other.role} <= set(shared):
            assert not set(one.devices) & set(other.devices)
    for plan in plans.values():
        assert len(set(plan.devices)) == plan.per_host
        assert set(plan.devices) <= set(range(gpus))


def test_too_few_devices_are_told_in_a_table() -> None:
    with pytest.raises(ConfigError) as caught:
        _plan(4, ranks=4)
    lines = str(caught.value).splitlines()
    assert "4 there" in lines[0]
    assert [line.split() for line in lines[2:4]] == [
        ["trainer", "4", "0,", "1,", "2,", "3"],
        ["generator", "1", "none"],
    ]


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ({"devices": {"trainer": [0]}}, "2 .* 0$"),
        ({"devices": {"trainer": [0, 9]}}, "0, 9"),
        ({"devices": {"reference": [3]}}, "placement.devices: reference is named, but this run"),
        ({"devices": {"trainer": [0, 1], "generator": [1]}}, "trainer and generator both have .1."),
    ],
)
def test_devices_that_do_not_fit_are_refused(placement: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?m){message}"):
        _plan(4, ranks=2, placement=placement)


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ({"devices": {"trainer": [0, 0]}}, "each once"),
        ({"devices": {"trainer": [-1]}}, "greater than or equal to 0"),
        ({"colocate": ["trainer"]}, "two meshes or more"),
        ({"colocate": ["trainer", "critic"]}, "'trainer', 'reference' or 'generator'"),
    ],
)
def test_placements_that_cannot_be_meant_are_refused(
    placement: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        PlacementConfig.model_validate(placement)


def test_on_a_cpu_nobody_gets_a_gpu_and_threads_are_shared_fairly() -> None:
    plans = _plan(0, ranks=3)
    assert {plan.device for plan in plans.values()} == {"cpu"}
    assert {plan.cpu_threads for plan in plans.values()} == {4}
    assert process_environment(plans["trainer"], LOCAL) == {"CUDA_VISIBLE_DEVICES": ""}
    assert describe(plans["trainer"]) == "trainer: 3 processes on 1 host, CPU, 4 threads each"


def test_a_gpu_that_is_not_there_is_refused() -> None:
    trainer = TrainerConfig(device="cuda")
    with pytest.raises(ConfigError, match="'cuda' is asked for, but the hosts have none"):
        plan_placement(
            {"trainer": trainer}, GeneratorConfig(), PlacementConfig(), LOCAL, _inventory(0)
        )


def test_ranks_are_shared_equally_by_hosts() -> None:
    launch = LaunchConfig(kind="slurm", hosts={"trainer": 2, "generator": 1}, gpus_per_host=4)
    plans = _plan(4, ranks=8, launch=launch)
    assert (plans["trainer"].num_hosts, plans["trainer"].per_host) == (2, 4)
    # On hosts of its own, so from the first on.
    assert _devices(plans) == {"trainer": [0, 1, 2, 3], "generator": [0]}
    with pytest.raises(ConfigError, match="trainer.num_ranks: 7 ranks cannot be shared equally"):
        _plan(4, ranks=7, launch=launch)


def test_a_mesh_without_hosts_lies_on_the_trainers() -> None:
    launch = LaunchConfig(kind="slurm", hosts={"trainer": 2}, gpus_per_host=4)
    plans = _plan(4, ranks=6, launch=launch)
    assert _devices(plans) == {"trainer": [0, 1, 2], "generator": [3]}
    assert (plans["generator"].hosts, plans["generator"].num_hosts) == ("trainer", 1)
    with pytest.raises(ConfigError, match="GPUs on each host of the trainer do not fit"):
        _plan(4, ranks=8, launch=launch)


@pytest.mark.parametrize(
    ("variable", "names"),
    [
        (None, ["0", "1", "2", "3"]),
        ("", []),
        ("2,0", ["2", "0"]),
        ("1,-1,2", ["1"]),
        ("GPU-8a3b, 7, 1", ["GPU-8a3b"]),
    ],
)
def test_what_cuda_shows_is_what_is_dealt(variable: str | None, names: list[str]) -> None:
    gpus = [Gpu(str(i)) for i in range(4)]
    assert [gpu.name for gpu in visible(gpus, variable)] == names


def test_a_plan_names_devices_as_the_controller_sees_them() -> None:
    """With CUDA_VISIBLE_DEVICES=5,7 in its own environment, GPU 1 is the one called 7."""
    inventory = HostInventory((Gpu("5"), Gpu("7")), 4)
    plans = plan_placement(
        {"trainer": TrainerConfig()}, GeneratorConfig(), PlacementConfig(), LOCAL, inventory
    )
    assert plans["generator"].gpu_names == ("7",)


def test_hosts_on_this_machine_share_its_cores() -> None:
    launch = LaunchConfig(kind="processes", hosts={"trainer": 2, "generator": 1})
    here, parts = find_inventory(LOCAL).cores, find_inventory(launch).cores
    assert here is not None
    assert parts == max(1, here // 3)


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        ({"kind": "processes"}, "hosts.trainer is missing"),
        ({"hosts": {"trainer": 2}}, "kind: local is this machine alone"),
        ({"kind": "ssh", "hosts": {"trainer": 1}}, "hosts says nothing to kind: ssh"),
        ({"kind": "hosts", "addresses": {"trainer": ["node1"]}}, "not of the form tls://"),
        ({"kind": "hosts", "addresses": {"trainer": ["tls://a:1"]}}, "but tls is not given"),
        ({"kind": "ssh", "addresses": {"trainer": ["a", "a"]}}, "each of them once"),
        ({"kind": "ssh", "addresses": {"trainer": ["a"], "generator": []}}, "each of them once"),
        ({"kind": "ssh", "addresses": {"trainer": ["me@a"]}}, "not the name or address"),
        ({"python": "/bin/python"}, "python is for kinds"),
        ({"kind": "slurm", "hosts": {"trainer": 1}, "orphan_timeout_s": 5}, "at least lost_host_s"),
        ({"kind": "kubernetes", "hosts": {"trainer": 1}}, "kubernetes is missing"),
        ({"slurm": {"partition": "p"}}, "slurm is for kind: slurm"),
        ({"kind": "slurm", "hosts": {"trainer": 1}, "slurm": {"arguments": ["x"]}}, "dash"),
        ({"kind": "processes", "hosts": {"trainer": 1}, "gpus_per_host": 1}, "uses no GPU"),
    ],
)
def test_launches_that_cannot_be_meant_are_refused(launch: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        LaunchConfig.model_validate(launch)


def test_hosts_share_no_memory() -> None:
    values = {
        "run": {"folder": "r", "steps": 1},
        "model": {"path": "m"},
        "weights": {"transport": "shared_memory"},
        "launch": {"kind": "processes", "hosts": {"trainer": 1}},
    }
    with pytest.raises(ValidationError, match="weights.transport: shared_memory, but launch.kind"):
        GrpoConfig.model_validate(values)


def test_the_processes_of_a_plan_are_counted_over_hosts() -> None:
    plan = MeshPlan("trainer", "trainer", 2, 4, "cpu", (), (), 1)
    assert plan.num_processes == 8
    assert TrainerConfig(num_ranks=8, parallel=ParallelConfig(tensor=4)).dp_size == 2
