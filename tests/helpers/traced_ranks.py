"""Traces the graphs of all ranks in one process, under torch's fake process group, and runs them together."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor._redistribute as torch_redistribute
import torch.distributed.tensor.debug as tensor_debug
from functorch.compile import aot_function, make_boxed_func
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardweave
from shardweave.runtime.convert_specs import spec_of_layout

Groups = dict[str, tuple[int, ...]]
"""The ranks of each process group of a rank, by name."""


@contextmanager
def fake_rank(rank: int, mesh_shape: Sequence[int], world_size: int | None = None) -> Iterator[DeviceMesh]:
    """A context in which this process is a rank of a fake process group, with a mesh of all ranks."""
    size = world_size or math.prod(mesh_shape)
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield init_device_mesh("cpu", tuple(mesh_shape), mesh_dim_names=tuple("abcd"[: len(mesh_shape)]))
    finally:
        dist.destroy_process_group()
        tensor_debug._clear_sharding_prop_cache()  # its specs have meshes of this group


def groups_of_rank() -> Groups:
    groups = [g for g in dist.distributed_c10d._world.pg_group_ranks if isinstance(g, dist.ProcessGroup)]
    return {str(group.group_name): tuple(dist.get_process_group_ranks(group)) for group in groups}


def spec(mesh: DeviceMesh, layout: str, shape: Sequence[int], dtype: torch.dtype) -> DTensorSpec:
    meta = TensorMeta(torch.Size(shape), torch.empty(shape, device="meta").stride(), dtype)
    return spec_of_layout(shardweave.Layout.parse(layout, tuple(mesh.shape)), mesh, meta)


def trace_all(
    mesh_shape: Sequence[int],
    requests: Sequence[tuple[Sequence[int], torch.dtype, str, str, Sequence[torch.Tensor]]],
    by_autograd: bool = False,
    **options: Any,
) -> tuple[list[list[GraphModule]], list[Groups]]:
    """The graph of each request on each rank under `install(**options)`, and the process groups of each rank.

    Args:
        requests: shape, dtype, source, target, and the local tensor of each rank.
        by_autograd: traced by AOTAutograd instead of `make_fx`.
    """
    graphs: list[list[GraphModule]] = [[] for _ in requests]
    groups = []
    for rank in range(math.prod(mesh_shape)):
        with fake_rank(rank, mesh_shape) as mesh, shardweave.installed(**options):
            groups.append(groups_of_rank())
            for number, (shape, dtype, source, target, locals_) in enumerate(requests):
                function = _redistribution(*[spec(mesh, text, shape, dtype) for text in (source, target)])
                trace = graph_of_autograd if by_autograd else graph_of
                graphs[number].append(trace(function, locals_[rank]))
    return graphs, groups


def _redistribution(source: DTensorSpec, target: DTensorSpec) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: torch_redistribute.redistribute_local_tensor(x, source, target)


def graph_of(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> GraphModule:
    return make_fx(function, tracing_mode="fake")(x)


def graph_of_autograd(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> GraphModule:
    graphs: list[GraphModule] = []

    def compiler(graph: GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    with torch.no_grad(), FakeTensorMode() as mode:
        aot_function(function, fw_compiler=compiler)(mode.from_tensor(x))
    return graphs[0] if graphs else graph_of(function, x)  # AOTAutograd compiles nothing that returns its input


def collectives_in(graph: GraphModule, groups: Groups, rank: int) -> list[tuple[str, tuple[int, ...], int]]:
    """The collectives of a graph in its order: the operator, the ranks, and the bytes that this rank receives."""
    found = []
    for node in graph.graph.nodes:
        name = _collective_name(node)
        if name is None or name == "wait_tensor":
            continue
        sent, ranks = node.args[0].meta["val"], groups[node.args[-1]]
        received = {
            "all_to_all_single": lambda node=node, ranks=ranks: sum(node.args[1]) - node.args[1][ranks.index(rank)],
            "all_gather_into_tensor": lambda sent=sent, ranks=ranks: (len(ranks) - 1) * sent.numel(),
        }
        found.append((name, ranks, received[name]() * sent.element_size() if name in received else 0))
    return found


def _collective_name(node: Node) -> str | None:
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "_c10d_functional":
        return None
    return node.target._schema.name.split("::")[1]


def run_together(graphs: Sequence[GraphModule], inputs: Sequence[Any], groups: Sequence[Groups]) -> list[Any]:
    """The results of one graph per rank. Each collective waits until its ranks have come to the same one."""
    runs = [_run(graph, x) for graph, x in zip(graphs, inputs, strict=True)]
    results: list[Any] = [None] * len(runs)
    waiting: dict[int, tuple[str, tuple[Any, ...]]] = {}

    def advance(rank: int, value: torch.Tensor | None) -> None:
        waiting.pop(rank, None)
        try:
            waiting[rank] = runs[rank].send(value)  # type: ignore[arg-type]
        except StopIteration as end:
            results[rank] = end.value

    for rank in range(len(runs)):
        advance(rank, None)
    while waiting:
        at = {rank: (name, groups[rank][args[-1]]) for rank, (name, args) in waiting.items()}
        ready = next((r for r, (name, ranks) in at.items() if all(at.get(q) == (name, ranks) for q in ranks)), None)
        assert ready is not None, f"ranks wait for ever: {at}"
        name, ranks = at[ready]
        outputs = _COLLECTIVES[name]([waiting[rank][1] for rank in ranks])
        for rank, output in zip(ranks, outputs, strict=True):
            advance(rank, output)
    return results


def _run(graph: GraphModule, x: Any) -> Generator[tuple[str, tuple[Any, ...]], torch.Tensor, Any]:
    """Run a graph; yields each collective with its arguments, and is sent its result."""
    values: dict[Node, Any] = {}
    inputs = iter(x if isinstance(x, tuple) else (x,))
    for node in graph.graph.nodes:
        args, options = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        name = _collective_name(node)
        if node.op == "placeholder":
            values[node] = next(inputs)
        elif node.op == "get_attr":
            values[node] = getattr(graph, node.target)
        elif node.op == "output":
            result = args[0]
            return result[0] if isinstance(result, list | tuple) and len(result) == 1 else result
        elif name == "wait_tensor":
            values[node] = args[0]
        elif name is not None:
            values[node] = yield name, args
        else:
            values[node] = node.target(*args, **options)
    return None


def _all_to_all(arguments: Sequence[Any]) -> list[torch.Tensor]:
    parts = [x.split(list(sent)) for x, _, sent, _ in arguments]
    outputs = []
    for number, (_, received, _, _) in enumerate(arguments):
        assert [len(of[number]) for of in parts] == list(received)
        outputs.append(torch.cat([of[number] for of in parts]))
    return outputs


def _all_gather(arguments: Sequence[Any]) -> list[torch.Tensor]:
    return [torch.cat([x for x, *_ in arguments]) for _ in arguments]


def _reduced(arguments: Sequence[Any]) -> torch.Tensor:
    total = arguments[0][0]
    for x, *_ in arguments[1:]:
        total = total + x if arguments[0][1] == "sum" else total * x
    return total


_COLLECTIVES: dict[str, Callable[[Sequence[Any]], list[torch.Tensor]]] = {
    "all_to_all_single": _all_to_all,
    "all_gather_into_tensor": _all_gather,
    "all_reduce": lambda arguments: [_reduced(arguments)] * len(arguments),
    "reduce_scatter_tensor": lambda arguments: list(_reduced(arguments).chunk(len(arguments))),
}
