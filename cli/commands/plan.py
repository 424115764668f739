"""`python -m shardweave plan`: show how a tensor gets from one layout to another, and what it costs."""

from __future__ import annotations

import argparse
import json
import math

from ...bench.harness.writable import check_writable
from ...errors import ArgumentError, shown
from ...planner import Mesh, Program, draw, plan
from ...runtime.executor.lower import AssumedTransport, explain_on
from ...runtime.transports.policies import WindowPolicy
from ...runtime.transports.select import NAMES
from .shared import TOPOLOGIES, dtype, file_of, topology, whole_number

HELP = "show how a tensor gets from one layout to another, and what it costs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mesh", type=_mesh_text, required=True, metavar="SIZES[@RANK]", help="such as 2,2, or 2,2@8 from rank 8 on"
    )
    parser.add_argument(
        "--target-mesh", type=_mesh_text, metavar="SIZES[@RANK]", help="the target's mesh, if it is another"
    )
    parser.add_argument("--shape", type=_sizes, required=True, help='global tensor shape, such as 8,6 ("" is a scalar)')
    parser.add_argument(
        "--dtype", type=dtype, default="float32", help="such as bfloat16, or bf16 (default: %(default)s)"
    )
    parser.add_argument(
        "--topology",
        metavar="NAME|FILE",
        help=f"what links the ranks: {', '.join(TOPOLOGIES)}, or a JSON file (default: bytes alone decide)",
    )
    parser.add_argument("--max-bytes", type=whole_number, metavar="N", help="what a rank may hold at most")
    parser.add_argument(
        "--transport",
        choices=NAMES,
        help="also say how ranks of such a transport carry each step out, and why; mixed: on the topology's nodes",
    )
    parser.add_argument(
        "--backend", choices=("gloo", "nccl"), help="of the process groups of a process_group transport (default: gloo)"
    )
    parser.add_argument(
        "--reduction",
        choices=("ordered", "fast"),
        help="fast: a process_group transport's backend may reduce (default: no)",
    )
    parser.add_argument("--json", action="store_true", help="the program as JSON")
    parser.add_argument(
        "--svg", type=file_of(".svg"), metavar="FILE.svg", help="also draw the program there (up to 64 ranks)"
    )
    parser.add_argument(
        "source", help='layout, such as "S0 S1", "P S0" or "S0 S0 @ 0:1,0", or as torch prints it: "(Shard(dim=0), …)"'
    )
    parser.add_argument("target", help="layout, in the same form")


def run(arguments: argparse.Namespace) -> int:
    program = plan(
        _mesh(arguments.mesh),
        arguments.shape,
        arguments.dtype,
        arguments.source,
        arguments.target,
        target_mesh=None if arguments.target_mesh is None else _mesh(arguments.target_mesh),
        topology=topology(arguments.topology),
        max_bytes=arguments.max_bytes,
    )
    if arguments.json and arguments.transport is not None:
        raise ArgumentError("--transport: given with --json, which says nothing of transports; allowed: one of them")
    for option in ("backend", "reduction"):
        if getattr(arguments, option) is not None and arguments.transport not in ("process_group", "hierarchical"):
            raise ArgumentError(f"--{option}: without --transport process_group it says nothing; allowed: both")
    if arguments.svg is not None:
        check_writable("--svg", arguments.svg)
        arguments.svg.write_text(draw(program), encoding="utf-8")
    if arguments.json:
        print(json.dumps(program.to_dict(), indent=1))
    elif arguments.transport is not None:
        transport = _assumed(program, arguments.transport, arguments.backend or "gloo")
        print(explain_on(program, transport, arguments.reduction or "ordered"))
    else:
        print(program.explain())
    return 0


def _assumed(program: Program, transport: str, backend: str) -> AssumedTransport:
    """A transport that is not there, to explain the program on."""
    node_size = program.topology.node_size if program.topology is not None else None
    if transport == "hierarchical" and node_size is None:
        raise ArgumentError("--transport hierarchical: of what nodes is not said; allowed: with a --topology of nodes")
    return AssumedTransport(
        program.mesh,
        transport in ("shared_memory", "symmetric_memory"),
        backend,
        WindowPolicy() if transport == "symmetric_memory" else None,
        node_size if transport == "hierarchical" else None,
    )


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(map(whole_number, text.split(","))) if text else ()
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{shown(text)}: sizes separated by commas are wanted, such as 2,2") from None


def _mesh_text(text: str) -> tuple[tuple[int, ...], int]:
    """Sizes, and the rank that the mesh begins at."""
    sizes, at, first = text.partition("@")
    if at and not (first.isdecimal() and len(first) <= 18):
        raise argparse.ArgumentTypeError(f"{shown(text)}: after @ a rank is wanted, such as 2,2@8")
    return _sizes(sizes), int(first or 0)


def _mesh(given: tuple[tuple[int, ...], int]) -> Mesh:
    sizes, first = given
    return Mesh(sizes, ranks=range(first, first + math.prod(sizes)) if first else None)
