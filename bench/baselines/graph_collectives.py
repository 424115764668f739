"""The collectives in graphs, and in those that torch.compile makes of a function."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule, Node


class Collectives(NamedTuple):
    """Of this rank.

    Attributes:
        counts: by operator.
        received: bytes from other ranks; of an all-reduce as a ring moves them.
    """

    counts: Counter[str]
    received: int

    def __str__(self) -> str:
        return ", ".join(f"{count} {name}" for name, count in sorted(self.counts.items())) or "none"


def collectives_of(function: Callable[..., Any], *inputs: Any, backward: bool = False) -> Collectives:
    """Compile a function and run it once, and with `backward` the gradient of the sum of its result as well."""
    graphs: list[GraphModule] = []

    def keep(graph: GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    result = torch.compile(function, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep), fullgraph=True)(*inputs)
    if backward:
        result.sum().backward()
    torch._dynamo.reset()
    return in_graphs(graphs)


def in_graphs(graphs: Iterable[GraphModule]) -> Collectives:
    """The collectives of some graphs, together."""
    counts: Counter[str] = Counter()
    received = 0
    for graph in graphs:
        for node in graph.graph.nodes:
            name = _name(node)
            if name is not None and name != "wait_tensor":
                counts[name] += 1
                received += _received(name, node)
    return Collectives(counts, received)


def _name(node: Node) -> str | None:
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "_c10d_functional":
        return None
    return node.target._schema.name.split("::")[1].removesuffix("_")


def _received(name: str, node: Node) -> int:
    group = next(arg for arg in reversed(node.args) if isinstance(arg, str))
    size = dist.get_world_size(dist.distributed_c10d._resolve_process_group(group))  # type: ignore[arg-type]
    sent = node.args[0].meta["val"]  # type: ignore[union-attr]
    if name == "all_to_all_single":
        own = dist.get_rank(dist.distributed_c10d._resolve_process_group(group))  # type: ignore[arg-type]
        sizes: Any = node.args[1]
        return (sum(sizes) - sizes[own]) * sent[:1].nbytes if len(sent) else sum(sizes) * sent.element_size()
    if name == "all_gather_into_tensor":
        return (size - 1) * sent.nbytes
    rest = sent.nbytes * (size - 1) // size
    return 2 * rest if name == "all_reduce" else rest
