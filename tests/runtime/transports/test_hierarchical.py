"""Programs that push inside nodes and send across nodes: real processes on pretended nodes, and simulated ranks."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import run_ranks
from test_drop_in import refused_meanwhile, waited_for_later
from test_fsdp import collectives_alone
from test_fuzz import ascending, check_on_a_rank, drawn, many_on_ranks, placements_of, spec_of, with_strides
from test_redistribute_meshes import batches, on_nodes, one_disagrees, to_other_meshes
from test_simulate import oracle, poison  # noqa: F401
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import shardweave
from shardweave.__main__ import main
from shardweave.errors import ArgumentError, PeerError, TransportError, UnsupportedError
from shardweave.planner import Topology
from shardweave.runtime.executor import pieces
from shardweave.runtime.executor.choose_algorithm import AssumedTransport, explain_on
from shardweave.runtime.transports.backend_limits import BACKENDS, CollectiveLimits
from shardweave.runtime.transports.select import current_transports

SLOW = shardweave.Link(latency_us=1, gigabytes_per_s=0.001, one_sided=False)
NODES = replace(shardweave.NVLINK_INFINIBAND, node_size=2, network=SLOW)
PRETENDED = {"SHARDWEAVE_NODE_SIZE": "2"}
SOON = {**PRETENDED, "SHARDWEAVE_TIMEOUT": "20"}


def raw(x: torch.Tensor) -> bytes:
    x = x.cpu()
    return torch.empty(x.numel(), dtype=x.dtype).copy_(x.reshape(-1)).view(torch.uint8).numpy().tobytes()


# Simulated ranks


def check_bits(seeds: range, node_size: int, device: str, backends: tuple[str | None, ...]) -> None:
    """Rounding sums of every kind of program are equal on one-sided, two-sided and hierarchical transports."""
    for seed in seeds:
        case = drawn(seed)
        dtype = getattr(torch, case.dtype)
        given = case.whole()
        if dtype.is_floating_point and dtype.itemsize > 1:
            given = given * torch.rand(given.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        program = shardweave.plan(case.mesh, case.shape, dtype, case.source, case.target, topology=case.topology)
        random = Random(seed)
        shards = oracle.local_shards(case.mesh, case.shape, case.source, given)
        locals_ = [with_strides(x.to(dtype), random) for x in shards]
        wanted = shardweave.simulate(program, locals_)
        there = [x.to(device) for x in locals_]
        for backend in backends:
            got = shardweave.simulate(program, there, one_sided=False, backend=backend, node_size=node_size)
            for rank, (a, b) in enumerate(zip(got, wanted, strict=True)):
                assert a.shape == b.shape and raw(a) == raw(b), (
                    f"{case}\n{program.explain()}\nrank {rank}: {a}, not {b}"
                )


@pytest.mark.plan
@pytest.mark.parametrize("node_size", [2, 3])
def test_node_sizes_give_same_bits(node_size: int, poison: Any) -> None:  # noqa: F811
    check_bits(range(60), node_size, "cpu", (None, "gloo", "nccl"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_simulated_gpu_ranks_give_same_bits() -> None:
    check_bits(range(60), 2, "cuda", (None, "nccl"))


@pytest.mark.plan
def test_simulate_rejects_invalid_node_size() -> None:
    program = shardweave.plan((2,), (4,), "float32", "S0", "R")
    for wrong in (0, -1, 2.0, True):
        with pytest.raises(ArgumentError, match="node_size: .*; allowed: a whole number above 0, or None"):
            shardweave.simulate(program, [torch.zeros(2)] * 2, one_sided=False, node_size=wrong)  # type: ignore[arg-type]


@pytest.mark.plan
def test_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    nodes = tmp_path / "nodes.json"
    nodes.write_text(NODES.to_json())
    command = ["plan", "--mesh", "2,2", "--shape", "64,64", "--transport", "hierarchical", "S0 S0", "R R"]
    assert main([*command, "--topology", str(nodes)]) == 0
    shown = capsys.readouterr().out
    program = shardweave.plan((2, 2), (64, 64), "float32", "S0 S0", "R R", topology=NODES)
    assert shown == explain_on(program, AssumedTransport(program.mesh, False, node_size=2)) + "\n"
    assert "     by push: ranks of one node write into each other's memory" in shown
    for topology in ([], ["--topology", "nvlink"]):
        assert main([*command, *topology]) == 2
        assert "error: --transport hierarchical: the size of nodes is unknown; allowed: with a --topology of nodes" in (
            capsys.readouterr().err
        )


# Real processes

REAL = {3: [(3,), (1, 3)], 4: [(4,), (2, 2), (2, 1, 2)], 5: [(5,)]}


def digests(rank: int, ranks: int, transport: str, first: int, count: int) -> list[str]:
    """Digests of outputs of rounding sums. Each redistribution is first checked with exact values against slices."""
    random, meshes = Random(first), []
    for shape in REAL[ranks]:
        order = ascending(random, range(ranks), shape)
        meshes += [(shape, order, DeviceMesh("cpu", torch.tensor(order).view(shape)))]
    results = []
    for seed in range(first, first + count):
        shape, order, mesh = meshes[seed % len(meshes)]
        case, position = drawn(seed, shape), order.index(rank)
        check_on_a_rank(case, mesh, position, transport)
        dtype = getattr(torch, case.dtype)
        values = case.whole() * (0.1 if dtype.is_floating_point and dtype.itemsize > 1 else 1)
        mine = oracle.local_shards(case.mesh, case.shape, case.source, values)[position].to(dtype)
        x = DTensor(mine, spec_of(case, mesh, case.source, dtype), requires_grad=False)
        orders = dict(oracle.read(case.target).orders)
        for _ in range(2):  # the second with buffers that are kept ready
            y = shardweave.redistribute(x, placements_of(case.target), shard_order=orders, transport=transport,
                                        topology=case.topology)  # fmt: skip
            results.append(hashlib.blake2b(raw(y._local_tensor)).hexdigest())
    return results


@pytest.mark.multi
@pytest.mark.parametrize(
    ("ranks", "count"), [*(pytest.param(*of, marks=pytest.mark.long) for of in ((4, 24), (3, 16))), (5, 12)]
)
def test_random_redistributions_give_the_bits_of_shared_memory(ranks: int, count: int) -> None:
    mixed = run_ranks(digests, ranks, ranks, "hierarchical", 100 * ranks, count, environment=PRETENDED)
    assert mixed == run_ranks(digests, ranks, ranks, "shared_memory", 100 * ranks, count)


def cut_messages() -> None:
    """Cut small messages too, and use no all-to-all for small shards."""
    pieces.PIECE_BYTES = 64
    BACKENDS["gloo"] = CollectiveLimits(all_to_all=0, all_gather=0)


def digests_in_pieces(rank: int, *args: Any) -> list[str]:
    cut_messages()
    return digests(rank, *args)


@pytest.mark.multi
def test_messages_in_pieces_give_the_bits_of_shared_memory() -> None:
    mixed = run_ranks(digests_in_pieces, 4, 4, "hierarchical", 700, 6, environment=PRETENDED)
    assert mixed == run_ranks(digests, 4, 4, "shared_memory", 700, 6)


class Counted:
    """Counts the messages of torch.distributed, and the bytes sent. Those to a rank must be to one of another node, but
    for a byte by which a rank that waits for long finds out whether its peer is alive."""

    def __init__(self, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.messages, self.sent = 0, 0

        def count(name: str) -> None:
            stock = getattr(dist.ProcessGroup, name)

            def post(group: dist.ProcessGroup, buffers: list[torch.Tensor], peer: int, tag: int) -> dist.Work:
                if buffers[0].nbytes > 1:
                    assert dist.get_global_rank(group, peer) // 2 != rank // 2, "the ranks share a node"
                    self.messages += 1
                    self.sent += buffers[0].nbytes * (name == "send")
                return stock(group, buffers, peer, tag)

            monkeypatch.setattr(dist.ProcessGroup, name, post)

        def all_to_all(group: Any, into: Any, given: Any, received: list[int], sent: list[int]) -> dist.Work:
            self.messages += sum(nbytes > 0 for nbytes in (*received, *sent))
            self.sent += sum(sent)
            return of_all(group, into, given, received, sent)

        count("send")
        count("recv")
        of_all = dist.ProcessGroupGloo.alltoall_base
        monkeypatch.setattr(dist.ProcessGroupGloo, "alltoall_base", all_to_all)


HEADER = 16  # bytes before a message of an all-to-all


def found() -> Topology | None:
    """The topology that four ranks find on their nodes."""
    return current_transports().machines.find_topology((0, 1, 2, 3), torch.device("cpu"))


def count_bytes(rank: int, topology: Topology | None) -> tuple[list[int], set[str], int]:
    mesh = init_device_mesh("cpu", (2, 2))
    x = torch.arange(96, dtype=torch.float32).reshape(12, 8)
    options = (Replicate(), Shard(0), Shard(1))
    crossing, means, within = [], set(), 0
    with pytest.MonkeyPatch.context() as monkeypatch:
        counted = Counted(rank, monkeypatch)
        for i, (a, b, c, d) in enumerate((a, b, c, d) for a in (*options, Partial()) for b in options for c in options
                                         for d in options):  # fmt: skip
            if i % 2 or (a, b) == (c, d):
                continue
            held = [Replicate() if p.is_partial() else p for p in (a, b)]
            local = distribute_tensor(x, mesh, held, src_data_rank=None).to_local()
            given = DTensor.from_local(local, mesh, (a, b), run_check=False, shape=x.shape, stride=x.stride())
            counted.messages = counted.sent = 0
            y = shardweave.redistribute(given, (c, d), topology=topology)
            times = 2 if a.is_partial() else 1
            assert y.to_local().equal(times * distribute_tensor(x, mesh, (c, d), src_data_rank=None).to_local())
            program = shardweave.plan(mesh, x.shape, x.dtype, (a, b), (c, d), topology=topology or found())
            traffic = [replaced_traffic(program, step, rank) for step in program.steps]
            # Across nodes the plan's bytes, so that bytes inside a node bypass torch.
            planned = 4 * sum(t.sent_far for t in traffic)
            assert planned <= counted.sent <= planned + HEADER * counted.messages, program.explain()
            within += sum(t.received_near for t in traffic)
            crossing.append(counted.sent)
            text = shardweave.explain(given, (c, d), topology=topology)
            means |= {line.strip() for line in text.splitlines() if line.startswith("     by ")}
            where = "on transport hierarchical: 4 ranks are on 2 machines, by SHARDWEAVE_NODE_SIZE=2"
            which = "topology given" if topology else "topology found: cpu"
            assert (where in text and which in text) or not program.exchanges, text
    assert shardweave.stats().transports[0, 1, 2, 3].startswith("hierarchical: 4 ranks are on 2 machines")
    assert shardweave.stats().calls["hierarchical"] > 20 and not shardweave.stats().delegations
    return crossing, means, within


def replaced_traffic(program: shardweave.Program, step: Any, position: int) -> Any:
    """The bytes that a rank exchanges inside and across nodes of two ranks, for any planned topology."""
    return replace(program, topology=NODES).traffic(step, position)


@pytest.mark.multi
@pytest.mark.parametrize("topology", [None, pytest.param(NODES, marks=pytest.mark.long)])
def test_bytes_inside_node_bypass_torch(topology: Topology | None) -> None:
    results = run_ranks(count_bytes, 4, topology, environment=PRETENDED)
    for crossing, means, within in results:
        assert any(crossing) and not all(crossing) and within > 0
        assert "by push: ranks of one node write into each other's memory" in means
        assert any(text.startswith("by push and send: ranks of a node write into each") for text in means)


def count_bytes_of_a_batch(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    options = ([Shard(0), Shard(1)], [Shard(1), Shard(0)], [Shard(0), Replicate()], [Replicate(), Shard(1)])
    pairs = [(a, b) for a in options for b in options]
    xs = [torch.arange(35.0 + 7 * i).reshape(-1, 7).bfloat16() for i in range(len(pairs))]
    given = [distribute_tensor(x, mesh, a, src_data_rank=None) for x, (a, _) in zip(xs, pairs, strict=True)]
    requests = [(mesh, x.shape, x.dtype, a, b) for x, (a, b) in zip(xs, pairs, strict=True)]
    batch = shardweave.plan_batch(requests, topology=found())
    far = sum(replaced_traffic(p, step, rank).sent_far for p in batch.programs for step in p.steps)
    with pytest.MonkeyPatch.context() as monkeypatch:
        counted = Counted(rank, monkeypatch)
        for _ in range(3):
            counted.messages = counted.sent = 0
            outs = shardweave.redistribute_batch(given, [b for _, b in pairs])
            for x, y, (_, b) in zip(xs, outs, pairs, strict=True):
                assert y.to_local().equal(distribute_tensor(x, mesh, b, src_data_rank=None).to_local())
            # In each round one message at most to and from each of the other node; each tensor's part at a multiple of
            # 16 bytes.
            assert counted.messages <= 4 * batch.exchanges
            assert 0 < 2 * far <= counted.sent < 2 * far + 2 * 16 * len(pairs) * batch.exchanges


@pytest.mark.multi
def test_batch_exchanges_inside_and_across_nodes() -> None:
    run_ranks(count_bytes_of_a_batch, 4, environment=PRETENDED)


@pytest.mark.multi
@pytest.mark.long
def test_other_meshes_topologies_and_batches() -> None:
    assert min(run_ranks(to_other_meshes, 4, "hierarchical", environment=PRETENDED)) == 100
    assert (
        run_ranks(on_nodes, 4, "hierarchical", environment={**PRETENDED, "SHARDWEAVE_TRANSPORT": "hierarchical"})
        == [72] * 4
    )
    assert run_ranks(batches, 4, "hierarchical", environment=PRETENDED) == [270] * 4


@pytest.mark.multi
def test_async_result_waits_on_first_use() -> None:
    run_ranks(waited_for_later, 4, "hierarchical", environment={**PRETENDED, "SHARDWEAVE_TRANSPORT": "hierarchical"})
    run_ranks(refused_meanwhile, 2, environment={"SHARDWEAVE_NODE_SIZE": "1", "SHARDWEAVE_TRANSPORT": "hierarchical"})


def several_transports_at_once(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("across", "inside"))
    x = torch.arange(64.0).reshape(8, 8)
    whole, across, inside = (distribute_tensor(x, m, [Shard(0)] * m.ndim, src_data_rank=None)
                             for m in (mesh, mesh["across"], mesh["inside"]))  # fmt: skip
    for _ in range(3):
        begun = []
        for given, transport in (
            (whole, "hierarchical"),
            (inside, "shared_memory"),
            (across, "process_group"),
            (whole, "hierarchical"),
        ):
            y = shardweave.redistribute(given, [Shard(1)] * given.device_mesh.ndim, async_op=True)
            assert shardweave.stats().transports[tuple(given.device_mesh.mesh.flatten().tolist())].startswith(transport)
            begun.append(y)
        # On both parts of a hierarchical transport at once, then on the whole transport, and in the opposite order.
        for y in begun if rank % 2 else reversed(begun):
            assert y.full_tensor().equal(x)


@pytest.mark.multi
def test_hierarchical_transport_alternates_with_its_parts() -> None:
    run_ranks(several_transports_at_once, 4, environment=PRETENDED)


def installed(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    x = torch.arange(48.0).reshape(8, 6)
    with shardweave.installed():
        d = distribute_tensor(x, mesh, [Shard(0), Shard(1)], src_data_rank=None).requires_grad_()
        y = d.redistribute(placements=[Shard(1), Shard(0)])
        product = (y @ y.T).full_tensor()
        product.sum().backward()
    assert product.equal(x @ x.T)
    assert d.grad.full_tensor().allclose(2 * x.sum(0).expand(8, 6))
    assert shardweave.stats().calls["hierarchical"] > 3 and not shardweave.stats().delegations


@pytest.mark.multi
def test_drop_in_on_hierarchical_transport() -> None:
    run_ranks(installed, 4, environment=PRETENDED)


@pytest.mark.multi
def test_fsdp_collectives_on_hierarchical_transport() -> None:
    run_ranks(collectives_alone, 4, "hierarchical", environment={**PRETENDED, "SHARDWEAVE_TRANSPORT": "hierarchical"})


def chosen(rank: int) -> None:
    meshes = {ranks: DeviceMesh("cpu", list(ranks)) for ranks in ((0, 1), (0, 2), (1, 2, 3))}
    there = "machine, by SHARDWEAVE_NODE_SIZE=2"
    transports = (
        f"shared_memory: all ranks are on this {there}",
        f"process_group: each rank is on another {there}",
        f"hierarchical: 3 ranks are on 2 {there.replace('machine', 'machines')}",
    )
    for ranks, transport in zip(meshes, transports, strict=True):
        if rank not in ranks:
            continue
        x = distribute_tensor(torch.arange(12.0), meshes[ranks], [Shard(0)], src_data_rank=None)
        assert shardweave.redistribute(x, [Replicate()]).to_local().equal(torch.arange(12.0))
        assert shardweave.stats().transports[ranks] == transport
        # The hierarchical transport may be requested for any ranks.
        assert shardweave.redistribute(x, [Replicate()], transport="hierarchical").to_local().equal(torch.arange(12.0))
        assert shardweave.stats().transports[ranks] == "hierarchical: requested"
        if ranks != (0, 1):
            allowed = transport.partition(":")[0]
            with pytest.raises(UnsupportedError, match=f"cannot carry ranks .* on another {there}; allowed: {allowed}"):
                shardweave.redistribute(x, [Replicate()], transport="shared_memory")


@pytest.mark.multi
def test_transport_selected_by_nodes() -> None:
    run_ranks(chosen, 4, environment=SOON)


def refuse_node_sizes(rank: int) -> None:
    import os

    for wrong in ("0", "-1", "two", "1.5", "²"):
        os.environ["SHARDWEAVE_NODE_SIZE"] = wrong
        with pytest.raises(ArgumentError, match=f"SHARDWEAVE_NODE_SIZE: '{wrong}'; allowed: a whole number of ranks"):
            move_something()
    if rank:
        os.environ["SHARDWEAVE_NODE_SIZE"] = "2"
    else:
        del os.environ["SHARDWEAVE_NODE_SIZE"]
    with pytest.raises(
        ArgumentError, match=r"SHARDWEAVE_NODE_SIZE: (2|not set) on rank \d, (2|not set) on rank \d; al"
    ):
        move_something()


def move_something() -> None:
    mesh = init_device_mesh("cpu", (2,))
    shardweave.redistribute(distribute_tensor(torch.zeros(2), mesh, [Shard(0)]), [Replicate()])


@pytest.mark.multi
def test_invalid_or_different_node_sizes_raise() -> None:
    run_ranks(refuse_node_sizes, 2)


@pytest.mark.long
@pytest.mark.multi
@pytest.mark.parametrize("node_size", ["2", "3", "5"])
def test_random_redistributions_of_eight_ranks_at_length(node_size: str) -> None:
    environment = {"SHARDWEAVE_NODE_SIZE": node_size}
    assert run_ranks(many_on_ranks, 8, 8, "hierarchical", 3000, 50, environment=environment, timeout=500) == [50] * 8


# Failures


@pytest.mark.multi
def test_different_requests_between_meshes_raise() -> None:
    results = run_ranks(one_disagrees, 4, "hierarchical", environment=SOON)
    assert "nothing" not in results and "DisagreementError" in results


def fail_alone(rank: int, topology: Topology | None, where: str) -> str:
    """Rank 1 fails in a call and stays alive: ranks that wait for it, directly or indirectly, raise."""
    store = dist.distributed_c10d._get_default_store()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("across", "inside"))
    x = distribute_tensor(torch.arange(256.0).reshape(16, 16), mesh, [Shard(0), Shard(1)], src_data_rank=None)
    inside = distribute_tensor(torch.arange(4.0), mesh["inside"], [Shard(0)], src_data_rank=None)

    def call(given: DTensor = x) -> None:
        shardweave.redistribute(given, [Replicate()] * given.device_mesh.ndim, topology=topology)

    call()
    call(inside)
    if rank == 1:
        with pytest.MonkeyPatch.context() as monkeypatch:

            def no_room(*arguments: object) -> torch.Tensor:
                raise TransportError("no room")

            monkeypatch.setattr("shardweave.runtime.transports.shared_memory.shared_pool.SharedPool.empty", no_room)
            with pytest.raises(TransportError, match="no room"):
                call(inside if where == "inside" else x)
    with pytest.raises(TransportError) as error_texts:
        call(inside if rank == 0 and where == "inside" else x)
    with pytest.raises(TransportError):
        call()
    store.set(f"told/{rank}", "")
    # No rank exits, so that no peer is notified by a closed connection.
    store.wait([f"told/{other}" for other in range(4)])
    assert rank == 1 or isinstance(error_texts.value, PeerError), error_texts.value
    return str(error_texts.value)


@pytest.mark.multi
@pytest.mark.parametrize(("topology", "where"), [(None, "everywhere"), (NODES, "everywhere"), (None, "inside")])
def test_failure_reaches_peers_of_other_part(topology: Topology | None, where: str) -> None:
    results = run_ranks(
        fail_alone, 4, topology, where, environment={**PRETENDED, "SHARDWEAVE_TIMEOUT": "50"}, timeout=90
    )
    assert "rank 1" in results[0] and "failed" in results[0] and "no room" in results[1]
    assert all("failed" in text and "rank" in text for text in results[2:]), results
    assert any("rank 1 failed: no room" in text or "rank 0 failed: " in text for text in results[2:]), results
