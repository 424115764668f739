"""`python -m shardweave plan`: print or draw the program of a redistribution."""

from __future__ import annotations

import argparse
import json
import math
import re

from ..bench.harness.writable import check_writable
from ..errors import ArgumentError, shown
from ..planner import TOPOLOGIES, Mesh, Program, draw, plan
from ..runtime.executor.choose_algorithm import AssumedTransport, explain_on
from ..runtime.transports.backend_limits import WindowPolicy
from ..runtime.transports.choose_transport import NAMES
from .output_streams import print_wrapped
from .parsing import dtype, file_of, layout_text, number_of_bytes, topology, whole_number

MOST_RANKS = 1024
"""Ranks up to which the whole program is planned, in some seconds: it has a box for each pair of ranks."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mesh",
        type=_mesh_text,
        required=True,
        metavar="SIZES[@RANK]",
        help="the mesh shape, such as 2,2 or 2x2; or 2,2@8 for ranks from 8",
    )
    parser.add_argument(
        "--target-mesh", type=_mesh_text, metavar="SIZES[@RANK]", help="the target's mesh (default: that of --mesh)"
    )
    parser.add_argument(
        "--shape", type=_sizes, required=True, help='the global tensor shape, such as 8,6 or 8x6 ("" is a scalar)'
    )
    parser.add_argument(
        "--dtype", type=dtype, default="float32", help="such as bfloat16, or bf16 (default: %(default)s)"
    )
    parser.add_argument(
        "--topology",
        metavar="NAME|FILE",
        help=f"the links between ranks: {', '.join(TOPOLOGIES)}, or a JSON file (default: minimise bytes)",
    )
    parser.add_argument(
        "--max-bytes",
        type=number_of_bytes,
        metavar="BYTES",
        help="the most bytes that a rank may hold at any time, such as 1048576, 1M or 1MiB",
    )
    parser.add_argument(
        "--transport",
        choices=NAMES,
        help="also explain the algorithm of each step on this transport; hierarchical: on the nodes of --topology",
    )
    parser.add_argument("--backend", choices=("gloo", "nccl"), help="the backend of process groups (default: gloo)")
    parser.add_argument(
        "--reduction",
        choices=("ordered", "fast"),
        help="fast: the backend of process groups may reduce (default: ordered)",
    )
    parser.add_argument(
        "--rank",
        type=whole_number,
        metavar="N",
        help="plan the part of the rank at this mesh position alone; needed on large meshes (default: of all ranks)",
    )
    parser.add_argument("--json", action="store_true", help="print the program as JSON")
    parser.add_argument(
        "--svg", type=file_of(".svg"), metavar="FILE.svg", help="also draw the program to this file (up to 64 ranks)"
    )
    parser.add_argument(
        "source",
        type=layout_text,
        help='layout, such as "S0 S1", "P S0" or "S0 S0 @ 0:1,0", or as torch prints it: "(Shard(dim=0), …)"',
    )
    parser.add_argument("target", type=layout_text, help="layout, in the same form")


def main(arguments: argparse.Namespace) -> int:
    """Plan a redistribution and print the program, as text or JSON.

    Raises:
        ArgumentError: options that exclude each other; an argument that `plan` refuses; a file that cannot be written.
    """
    given, mesh = arguments, _mesh(arguments.mesh)
    target_mesh = None if given.target_mesh is None else _mesh(given.target_mesh)
    size = mesh.size if target_mesh is None else max(mesh.size, target_mesh.size)
    if given.rank is None and size > MOST_RANKS:
        raise ArgumentError(f"--mesh: {size} ranks, and no --rank; allowed: up to {MOST_RANKS}, or one with --rank")
    program = plan(
        mesh, given.shape, given.dtype, given.source, given.target,
        target_mesh=target_mesh, rank=given.rank, topology=topology(given.topology), max_bytes=given.max_bytes,
    )  # fmt: skip
    if given.json and given.transport is not None:
        raise ArgumentError("--transport: given with --json, which does not contain transports; allowed: one of them")
    for option in ("backend", "reduction"):
        if vars(given)[option] is not None and given.transport not in ("process_group", "hierarchical"):
            raise ArgumentError(f"--{option}: given without --transport process_group or hierarchical; allowed: both")
    if given.svg is not None:
        check_writable("--svg", given.svg)
        given.svg.write_text(draw(program), encoding="utf-8")
    if given.json:
        print(json.dumps(program.to_dict(), indent=1))
    elif given.transport is not None:
        transport = _assumed_transport(program, given.transport, given.backend or "gloo")
        print_wrapped(explain_on(program, transport, given.reduction or "ordered"))
    else:
        print_wrapped(program.explain())
    return 0


def _assumed_transport(program: Program, transport: str, backend: str) -> AssumedTransport:
    """A transport that no ranks have, to explain the program on."""
    node_size = program.topology.node_size if program.topology is not None else None
    if transport == "hierarchical" and node_size is None:
        raise ArgumentError(
            "--transport hierarchical: the size of nodes is unknown; allowed: with a --topology of nodes"
        )
    return AssumedTransport(
        program.mesh,
        transport in ("shared_memory", "symmetric_memory"),
        backend,
        WindowPolicy() if transport == "symmetric_memory" else None,
        node_size if transport == "hierarchical" else None,
    )


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(map(whole_number, re.split("[,xX×]", text))) if text else ()
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{shown(text)}: not sizes separated by commas or x, such as 2,2") from None


def _mesh_text(text: str) -> tuple[tuple[int, ...], int]:
    """The sizes, and the first rank of the mesh."""
    sizes, at, first = text.partition("@")
    if at and not (first.isdecimal() and len(first) <= 18):
        raise argparse.ArgumentTypeError(f"{shown(text)}: not a rank after @, as in 2,2@8")
    mesh = _sizes(sizes)
    if 0 in mesh:
        raise argparse.ArgumentTypeError(f"{shown(text)}: a mesh dim of size 0; allowed: sizes of 1 or more")
    return mesh, int(first or 0)


def _mesh(sizes_and_first: tuple[tuple[int, ...], int]) -> Mesh:
    sizes, first = sizes_and_first
    return Mesh(sizes, ranks=range(first, first + math.prod(sizes)) if first else None)
