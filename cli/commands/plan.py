"""The arguments of `python -m shardweave plan`."""

from __future__ import annotations

import argparse
import math
import re

from ...errors import shown
from ...planner import TOPOLOGIES, Mesh
from ...runtime.transports.choose_transport import NAMES
from .parsing import dtype, file_of, layout_text, number_of_bytes, topology, whole_number

HELP = "print the steps, bytes and cost of a redistribution"


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


def run(arguments: argparse.Namespace) -> int:
    from .. import plan

    return plan.run(
        _mesh(arguments.mesh),
        arguments.shape,
        arguments.dtype,
        arguments.source,
        arguments.target,
        target_mesh=None if arguments.target_mesh is None else _mesh(arguments.target_mesh),
        topology=topology(arguments.topology),
        rank=arguments.rank,
        max_bytes=arguments.max_bytes,
        transport=arguments.transport,
        backend=arguments.backend,
        reduction=arguments.reduction,
        as_json=arguments.json,
        svg=arguments.svg,
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
