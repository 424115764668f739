"""Topologies that ranks find: nodes from their machines, figures from the table or from `calibrate`, equal on all."""

from __future__ import annotations

import json
import logging
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import run_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import shardweave
from shardweave.errors import ArgumentError, DisagreementError
from shardweave.planner import MachineFigures, found_topology
from shardweave.runtime.transports import machine_figures, machines, select
from shardweave.runtime.transports.calibration_cache import (
    calibration_file,
    keep_calibration,
    machine_kind,
    read_calibration,
)

CPU = torch.device("cpu")
MEASURED = {"node": {"latency_us": 3.0, "gigabytes_per_s": 7.0, "one_sided": True, "message_us": 0.0}, "call_us": 2.0}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return calibration_file()


def on_hosts(rank: int, hosts: str, folder: str) -> tuple[Any, ...]:
    """Ranks whose machines are named by a letter each, with cache files of their own."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("XDG_CACHE_HOME", f"{folder}/{rank}")
        if rank:  # not on rank 0, and another figure on each
            keep_calibration(machine_kind(CPU), {"call_us": float(rank)})
        monkeypatch.setattr(machines, "machine_name", lambda: f"host-{hosts[rank]}")
        if rank == len(hosts) - 1:
            time.sleep(0.3)  # arrives late
        mesh = init_device_mesh("cpu", (len(hosts),))
        # Nothing is exchanged here, so nobody waits for the other ranks' machines.
        whole = torch.arange(240.0 * 256).reshape(240, 256)
        replicated = distribute_tensor(whole, mesh, [Replicate()], src_data_rank=None)
        shardweave.redistribute(replicated, [Shard(0)])
        assert not select.current_transports().machines.has_topologies
        request: Any = (240, 256), "float32", "S0", "R"
        assert shardweave.plan(mesh, *request).topology is None
        one_node = shardweave.redistribute_cost(mesh, *request)
        texts = []
        sharded = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
        terms = DTensor.from_local(whole.clone(), mesh, [Partial()], run_check=False)
        for given, target in ((sharded, Replicate()), (terms, Replicate()), (terms, Shard(1))):
            times = len(hosts) if given.placements[0].is_partial() else 1
            for _ in range(2):
                out = shardweave.redistribute(given, [target])
                wanted = distribute_tensor(times * whole, mesh, [target], src_data_rank=None)
                assert torch.equal(out.to_local(), wanted.to_local())
            texts.append(shardweave.explain(given, [target]))
        topology = select.current_transports().machines.find_topology(tuple(range(len(hosts))), CPU)
        if topology is not None:
            planned = shardweave.plan(mesh, *request)
            assert planned.topology == topology and "\n  topology found: calibrated on" in planned.explain()
            cost = shardweave.redistribute_cost(mesh, *request)
            assert cost == shardweave.redistribute_cost(mesh, *request, topology) > one_node
            assert shardweave.redistribute_cost(mesh, *request, shardweave.NVLINK_NODE) == one_node
        # Ranks that are not on the mesh's machines, ranks that have not met, and no ranks at all.
        for unknown in (DeviceMesh("cpu", [0, 1]), (len(hosts),), shardweave.Mesh((len(hosts),))):
            assert shardweave.plan(unknown, *request).topology is None
        return topology, None if topology is None else topology.origin, texts


@pytest.mark.multi
@pytest.mark.parametrize("hosts", ["abb", pytest.param("abaac", marks=pytest.mark.long)])
def test_ranks_of_uneven_hosts_find_same_topology(hosts: str, tmp_path: Path) -> None:
    results = run_ranks(on_hosts, len(hosts), hosts, str(tmp_path))
    for topology, origin, texts in results:
        assert topology == results[0][0] and topology.nodes == tuple("abc".index(host) for host in hosts)
        # The figures of the first rank that has any, of the first ranks of the hosts.
        assert topology.call_us == 1.0
        assert "calibrated on cpu" in origin
        assert all("\n  topology found: calibrated on cpu" in text for text in texts)


@pytest.mark.multi
def test_ranks_of_one_host_find_none(tmp_path: Path) -> None:
    for topology, _, texts in run_ranks(on_hosts, 2, "aa", str(tmp_path)):
        assert topology is None and not any("topology" in text for text in texts)


def refused_by_other_host(rank: int) -> str:
    """The error of a rank whose first request with another host is refused there."""
    inside, across = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1, 2])
    if rank < 2:
        terms = DTensor.from_local(torch.ones(4, 4), inside, [Partial()], run_check=False)
        shardweave.redistribute(terms, [Replicate()])
    dist.barrier()
    if rank == 0:
        return ""
    sharded = DTensor.from_local(torch.ones(2, 4), across, [Shard(0)], run_check=False)
    with pytest.raises((ArgumentError, DisagreementError)) as error:
        shardweave.redistribute(sharded, [Shard(9) if rank == 2 else Replicate()])
    return str(error.value)


@pytest.mark.multi
def test_refusal_ends_wait_for_figures() -> None:
    environment = {"SHARDWEAVE_NODE_SIZE": "2", "SHARDWEAVE_TIMEOUT": "30"}
    error = run_ranks(refused_by_other_host, 3, environment=environment)[1]
    assert error.startswith("rank 2 refused its arguments in a call of ranks of (1, 2)"), error


def after_prepare(rank: int) -> str:
    """What one rank explains after `prepare`, while the others do nothing."""
    mesh = init_device_mesh("cpu", (3,))
    shardweave.prepare(mesh, 1 << 10)
    sharded = DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)], run_check=False)
    text = shardweave.explain(sharded, [Replicate()]) if rank == 0 else ""
    dist.barrier()
    return text


@pytest.mark.multi
def test_prepare_finds_topology() -> None:
    environment = {"SHARDWEAVE_NODE_SIZE": "2", "SHARDWEAVE_TIMEOUT": "30"}
    assert "\n  topology found: " in run_ranks(after_prepare, 3, environment=environment)[0]


def in_domains(rank: int, hosts: str, domains: str) -> Any:
    """The nodes of the topology for GPUs, whose NVLink domains are named by a letter each."""
    gpu = torch.device("cuda", 0)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(machines, "machine_name", lambda: f"host-{hosts[rank]}")
        monkeypatch.setattr(machines, "machine_figures", lambda device: MachineFigures("GB200", "RDMA", 4))
        monkeypatch.setattr(machines, "nvlink_domain", lambda device: domains[rank].strip() or None)
        topology = select.current_transports().machines.find_topology(tuple(range(len(hosts))), gpu)
        dist.barrier()
    return None if topology is None else [topology.node_of(r) for r in range(len(hosts))]


@pytest.mark.multi
@pytest.mark.parametrize(
    ("hosts", "domains", "nodes"),
    [("abcd", "xxyy", [0, 0, 1, 1]),
     pytest.param("abcc", "xx  ", [0, 0, 1, 1], marks=pytest.mark.long)],
)  # fmt: skip
def test_machines_that_nvlink_connects_are_one_node(hosts: str, domains: str, nodes: list[int] | None) -> None:
    assert run_ranks(in_domains, len(hosts), hosts, domains) == [nodes] * len(hosts)


@pytest.mark.plan
def test_figures_of_table_and_of_calibrate() -> None:
    cpu = MachineFigures("cpu", nic_gigabytes_per_s=2.5)
    for name in ("NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA GB200", "something new"):
        gpu = MachineFigures(name, "RDMA", 8)
        topology = found_topology([0, 0, 1], [gpu])
        assert topology is not None and topology.nics_per_node == 8 and topology.full_duplex
        assert name in topology.origin and "nominal" in topology.origin
    table, measured = (found_topology([0, 1], [machine]) for machine in (cpu, replace(cpu, measured=MEASURED)))
    assert table is not None and measured is not None
    assert table.network == measured.network and table.network.gigabytes_per_s == 2.5
    assert measured.node.gigabytes_per_s == 7.0 and measured.call_us == 2.0
    # Measured figures stand for all machines of the kind; of different machines the slowest counts.
    assert found_topology([0, 1], [cpu, replace(cpu, measured=MEASURED)]) == measured
    slow = replace(cpu, nic_gigabytes_per_s=0.125)
    mixed = found_topology([0, 1], [cpu, slow])
    assert mixed is not None and mixed.network.gigabytes_per_s == 0.125
    assert found_topology([0, 0, -1], [cpu]) is None
    with pytest.raises(ArgumentError, match="network: 'pigeons'; allowed: RDMA, TCP"):
        found_topology([0, 1], [MachineFigures("cpu", "pigeons")])


@pytest.mark.plan
def test_measured_network_is_shared_by_nics() -> None:
    link = {"latency_us": 1.0, "gigabytes_per_s": 80.0, "one_sided": False, "message_us": 0.0}
    rates = []
    for network, nics in (("RDMA", 8), ("TCP", 1)):
        topology = found_topology([0, 1], [MachineFigures("cpu", network, nics, measured={"network": link})])
        assert topology is not None
        rates.append(topology.network.gigabytes_per_s)
    assert rates == [10.0, 160.0]


@pytest.mark.plan
def test_calibration_is_kept_by_kind_of_machine(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read_calibration("mine") is None and not caplog.records
    assert keep_calibration("mine", MEASURED) == cache
    keep_calibration("other", {"call_us": 1.0})
    assert read_calibration("mine") == MEASURED and read_calibration("other") == {"call_us": 1.0}
    assert read_calibration("unknown") is None and not caplog.records
    assert [file.name for file in cache.parent.iterdir()] == [cache.name]
    keep_calibration(machine_kind(CPU), MEASURED)
    assert machine_figures.machine_figures(CPU).measured == MEASURED
    with pytest.raises(ArgumentError, match="mine: its figures; allowed: an object of call_us, memory_gig"):
        keep_calibration("mine", {"speed": 1})
    with pytest.raises(ArgumentError, match="topology: call_us -1; allowed"):
        keep_calibration("mine", {"call_us": -1})
    assert read_calibration("mine") == MEASURED


@pytest.mark.plan
@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "is ignored: Expecting"),
        ("[]", "version None; allowed: 1"),
        ('{"version": 2, "machines": {}}', "version 2; allowed: 1"),
        ('{"version": 1}', "no object of machines"),
        ('{"version": 1, "machines": {"mine": {"node": 3}}}', "topology: node"),
        ('{"version": 1, "machines": {"mine": {"name": "x"}}}', "mine: its figures; allowed"),
        (b"\xff\xfe", "is ignored: 'utf-8' codec"),
    ],
)
def test_damaged_file_is_ignored(content: str | bytes, why: str, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache.parent.mkdir()
    cache.write_bytes(content if isinstance(content, bytes) else content.encode())
    with caplog.at_level(logging.WARNING, "shardweave"):
        assert read_calibration("mine") is None
    (record,) = caplog.records
    assert why in record.getMessage() and str(cache) in record.getMessage()
    keep_calibration("mine", MEASURED)
    assert read_calibration("mine") == MEASURED
    assert json.loads(cache.read_text())["version"] == 1


@pytest.mark.plan
def test_file_of_another_user_is_ignored(
    cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_calibration("mine", MEASURED)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with caplog.at_level(logging.WARNING, "shardweave"):
        assert read_calibration("mine") is None
    assert "allowed: user 12345" in caplog.text


@pytest.mark.plan
def test_no_home_directory(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert machine_figures.machine_figures(CPU).measured is None and not caplog.records
    with pytest.raises(FileNotFoundError, match="Set XDG_CACHE_HOME"):
        keep_calibration("mine", MEASURED)


@pytest.mark.plan
@pytest.mark.parametrize(
    ("speed", "gigabytes"),
    [(b"25000", 3.125), (b"-1", None), (b"4294967295", None), (b"0", None), (b"", None), (b"\xff\xfe", None)],
)
def test_speed_of_ethernet(
    speed: bytes, gigabytes: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "eth7").mkdir()
    (tmp_path / "eth7" / "speed").write_bytes(speed)
    (tmp_path / "route").write_text("Iface\tDestination\neth7\t00000000\n")
    monkeypatch.setattr(machine_figures, "_NETWORKS", tmp_path)
    monkeypatch.setattr(machine_figures, "_ROUTES", tmp_path / "route")
    (tmp_path / "docker0").mkdir()
    (tmp_path / "docker0" / "speed").write_text("10000")
    for named in ("eth7,eth8", "=eth7", "^docker0", "absent", "", "a" * 5000):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", named)
        found = machine_figures.machine_figures(CPU).nic_gigabytes_per_s
        assert found == (None if len(named) > 255 else gigabytes)
