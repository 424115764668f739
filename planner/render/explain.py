"""A program as text."""

from __future__ import annotations

from collections.abc import Sequence

from ..dtypes import ITEMSIZE
from ..exchange import FILL
from ..mesh import Mesh
from ..program import Exchange, Program, Step, format_bytes


def explain(program: Program, means: Sequence[object] = ()) -> str:
    """Each step with the mesh dims it moves along, its boxes and bytes; then the totals.

    `means`: what carries each step out, where that is known.
    """
    lines = [title(program) if program.rank is None else f"{title(program)}, rank {program.rank}"]
    if program.is_identity:
        lines.append("  nothing to do: the output is the input")
    for number, step in enumerate(program.steps, 1):
        along = way(program, step)
        what = f"  {number}. {step.kind:<8} {step.source} → {step.target}"
        lines += [f"{what}   {along}" if along else what, "     " + ", ".join(notes(program, step))]
        lines += [f"     by {means[number - 1]}"] if means else []
    return "\n".join([*lines, *(f"  {line}" for line in totals(program))])


def title(program: Program) -> str:
    """The request."""
    what = f"{program.dtype}{list(program.shape)}"
    if not program.crosses:
        return f"{program.src} → {program.dst}   {what} on {program.mesh}"
    ends = (program.src, program.source_mesh), (program.dst, program.target_mesh)
    return " → ".join(f"{layout} on {_with_ranks(mesh)}" for layout, mesh in ends) + f"   {what}"


def way(program: Program, step: Step) -> str:
    """The mesh dims that an exchange moves along, by name; empty for a local step."""
    if not isinstance(step, Exchange):
        return ""
    if step.group is None:
        return "from mesh to mesh"
    mesh = step.target_mesh
    names = mesh.names or tuple(map(str, range(mesh.ndim)))
    along = f"along {', '.join(names[m] for m in step.group)}"
    if not program.crosses:
        return along
    return f"{along} of the {'source' if mesh.same_ranks(program.source_mesh) else 'target'} mesh"


def notes(program: Program, step: Step) -> list[str]:
    """What a step takes: boxes, bytes, reduction, fill."""
    found = [f"{len(step.boxes)} box{'' if len(step.boxes) == 1 else 'es'}"]
    if isinstance(step, Exchange):
        size = ITEMSIZE[program.dtype]
        most = max(step.boxes.elements_received(r) for r in program.ranks) * size
        found.append(f"receives at most {format_bytes(most)}")
        if program.topology is not None and program.topology.node_size is not None:
            far = max(program.traffic(step, r).received_far for r in program.ranks) * size
            found[-1] += f" ({format_bytes(far)} over the network)"
    if step.reduce:
        found.append(str(step.reduce))
    if (step.boxes.sender == FILL).any():
        found.append(f"fills the rest with {step.fill}")
    return found


def totals(program: Program) -> list[str]:
    """Lines of text: bytes, bound and peak; on a topology the price too, and the routes that lost."""
    received = max(program.bytes_received)
    if program.bytes_bound is None:
        bound = "no bound with partial"
    else:
        over = [a - b for a, b in zip(program.bytes_received, program.bytes_bound, strict=True)]
        bound = f"bound {format_bytes(max(program.bytes_bound))}, {'met exactly' if not any(over) else 'not met'}"
    lines = [f"received {format_bytes(received)} ({bound}), peak {format_bytes(max(program.peak_bytes))}"]
    if program.topology is not None and program.cost_us is not None:
        over_network = format_bytes(max(program.bytes_over_network))
        lines.append(f"{program.cost_us:.1f} µs on {program.topology.name}, {over_network} over the network")
        for other in program.others:
            reason = f"{other.us / program.cost_us:.2f}×" if other.us > program.cost_us else "over max_bytes"
            lines.append(f"  not {other}: {other.us:.1f} µs, {reason}")
    return lines


def _with_ranks(mesh: Mesh) -> str:
    """A mesh with its ranks, if they are few."""
    ranks = mesh.rank_array.tolist()
    if ranks == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"{mesh} of ranks {ranks[0]}..{ranks[-1]}"
    return f"{mesh} of ranks {', '.join(map(str, ranks))}" if len(ranks) <= 16 else f"{mesh} of {len(ranks)} ranks"
