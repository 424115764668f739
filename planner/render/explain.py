"""Programs as text."""

from __future__ import annotations

from collections.abc import Sequence

from ..exchange.steps import Exchange, Step
from ..exchange.transfer_table import FILL
from ..layouts.dtypes import ITEMSIZE
from ..layouts.mesh import Mesh
from ..program_base import ProgramBase, Requested, format_bytes


def explain(program: ProgramBase, algorithms: Sequence[object] = ()) -> str:
    """For each step its mesh dims, boxes and bytes; then the totals.

    Args:
        algorithms: the algorithm that performs each step, if known.
    """
    lines = [title(program) if program.rank is None else f"{title(program)}, rank {program.rank}"]
    if program.requested is not None:
        lines.append("  planned as " + "".join(_layouts_on_meshes(program)))
    if program.is_identity:
        lines.append("  nothing to do: the output is the input")
    for number, step in enumerate(program.steps, 1):
        along = mesh_dims_of_step(program, step)
        change = f"  {number}. {step.kind:<8} {step.source} → {step.target}"
        lines += [f"{change}   {along}" if along else change, "     " + ", ".join(notes(program, step))]
        lines += [f"     by {algorithms[number - 1]}"] if algorithms else []
    return "\n".join([*lines, *(f"  {line}" for line in totals(program))])


def title(program: ProgramBase) -> str:
    """The request in one line: layouts, dtype, shape and meshes."""
    return _title(program, program.requested or program)


def title_as_planned(program: ProgramBase) -> str:
    """`title`, with the meshes of the program where their dims are split."""
    return _title(program, program)


def _title(program: ProgramBase, ends: ProgramBase | Requested) -> str:
    layouts, mesh = _layouts_on_meshes(ends)
    return f"{layouts}   {program.dtype}{list(program.shape)}{mesh}"


def _layouts_on_meshes(of: ProgramBase | Requested) -> tuple[str, str]:
    """The source and the target as text, and the text that follows: the mesh, if both are on one."""
    if of.source_mesh.same_ranks(of.target_mesh):
        return f"{of.source} → {of.target}", f" on {of.source_mesh}"
    ends = (of.source, of.source_mesh), (of.target, of.target_mesh)
    return " → ".join(f"{layout} on {_with_ranks(mesh)}" for layout, mesh in ends), ""


def mesh_dims_of_step(program: ProgramBase, step: Step) -> str:
    """The mesh dims along which ranks exchange in a step, by name; empty for a local step."""
    if not isinstance(step, Exchange):
        return ""
    if step.group is None:
        return "from mesh to mesh"
    mesh = step.target_mesh
    names = mesh.names or tuple(map(str, range(mesh.ndim)))
    along = f"along {', '.join(names[m] for m in step.group)}"
    if not program.is_cross_mesh:
        return along
    return f"{along} of the {'source' if mesh.same_ranks(program.source_mesh) else 'target'} mesh"


def notes(program: ProgramBase, step: Step) -> list[str]:
    """The boxes, bytes, reduction and fill of a step, as phrases."""
    phrases = [f"{len(step.boxes)} box{'' if len(step.boxes) == 1 else 'es'}"]
    if isinstance(step, Exchange):
        size = ITEMSIZE[program.dtype]
        most = max(step.boxes.elements_received(r) for r in program.ranks) * size
        phrases.append(f"receives at most {format_bytes(most)}")
        if program.topology is not None and program.topology.rank_nodes is not None:
            far = max(program.traffic(step, r).received_far for r in program.ranks) * size
            phrases[-1] += f" ({format_bytes(far)} over the network)"
    if step.reduce:
        phrases.append(str(step.reduce))
    if (step.boxes.sender[:, 0] == FILL).any():
        phrases.append(f"fills the rest with {step.fill}")
    return phrases


def totals(program: ProgramBase) -> list[str]:
    """Bytes, bound and peak, and on a topology the estimated time and the rejected paths, as lines of text."""
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
            reason = ""
            if other.over_max_bytes:
                reason = ", over max_bytes"
            elif program.cost_us:  # 0 without steps
                reason = f", {other.us / program.cost_us:.2f}×"
            lines.append(f"  not {other}: {other.us:.1f} µs{reason}")
        if program.topology.origin:
            lines.append(f"topology found: {program.topology.origin}")
    else:
        lines += [f"  not {other}: over max_bytes" for other in program.others if other.over_max_bytes]
    return lines


def _with_ranks(mesh: Mesh) -> str:
    """A mesh with its ranks, or their number if there are over 16 that are not consecutive."""
    ranks = mesh.rank_array.tolist()
    if ranks == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"{mesh} of ranks {ranks[0]}..{ranks[-1]}"
    return f"{mesh} of ranks {', '.join(map(str, ranks))}" if len(ranks) <= 16 else f"{mesh} of {len(ranks)} ranks"
