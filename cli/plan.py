"""`python -m shardweave plan`: print or draw the program of a redistribution."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ..bench.harness.writable import check_writable
from ..errors import ArgumentError
from ..planner import Mesh, Program, Topology, draw, plan
from ..runtime.executor.choose_algorithm import AssumedTransport, Reduction, explain_on
from ..runtime.transports.backend_limits import WindowPolicy
from .output_streams import print_wrapped

MOST_RANKS = 1024
"""Ranks up to which the whole program is planned, in some seconds: it has a box for each pair of ranks."""


def run(
    mesh: Mesh,
    shape: Sequence[int],
    dtype: str,
    source: str,
    target: str,
    *,
    target_mesh: Mesh | None,
    topology: Topology | None,
    rank: int | None,
    max_bytes: int | None,
    transport: str | None,
    backend: str | None,
    reduction: Reduction | None,
    as_json: bool,
    svg: Path | None,
) -> int:
    """Plan a redistribution and print the program, as text or JSON.

    Args:
        rank: a mesh position, whose part alone is planned; None: all ranks.
        transport: also explain which algorithm this transport uses for each step.
        backend, reduction: of the process groups of `transport`.
        svg: also draw the program to this file.

    Raises:
        ArgumentError: options that exclude each other; an argument that `plan` refuses; a file that cannot be written.
    """
    size = mesh.size if target_mesh is None else max(mesh.size, target_mesh.size)
    if rank is None and size > MOST_RANKS:
        raise ArgumentError(f"--mesh: {size} ranks, and no --rank; allowed: up to {MOST_RANKS}, or one with --rank")
    program = plan(
        mesh, shape, dtype, source, target,
        target_mesh=target_mesh, rank=rank, topology=topology, max_bytes=max_bytes,
    )  # fmt: skip
    if as_json and transport is not None:
        raise ArgumentError("--transport: given with --json, which does not contain transports; allowed: one of them")
    for option, value in (("backend", backend), ("reduction", reduction)):
        if value is not None and transport not in ("process_group", "hierarchical"):
            raise ArgumentError(f"--{option}: given without --transport process_group or hierarchical; allowed: both")
    if svg is not None:
        check_writable("--svg", svg)
        svg.write_text(draw(program), encoding="utf-8")
    if as_json:
        print(json.dumps(program.to_dict(), indent=1))
    elif transport is not None:
        print_wrapped(
            explain_on(program, _assumed_transport(program, transport, backend or "gloo"), reduction or "ordered")
        )
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
