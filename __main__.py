"""The command line: `python -m shardweave plan …`; `dispatch`, `demo`, `calibrate`, `doctor`, `record`, `replay`,
`bench`, `compare`, `report`."""

from __future__ import annotations

import argparse
import json
import math
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardweave import Mesh, Topology


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: sizes separated by commas are wanted, such as 2,2") from None


def _mesh_text(text: str) -> tuple[tuple[int, ...], int]:
    """Sizes, and the rank that the mesh begins at."""
    sizes, at, first = text.partition("@")
    if at and not first.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: after @ a rank is wanted, such as 2,2@8")
    return _sizes(sizes), int(first or 0)


def _mesh(given: tuple[tuple[int, ...], int]) -> Mesh:
    from shardweave import Mesh

    (sizes, first) = given
    return Mesh(sizes, ranks=range(first, first + math.prod(sizes)) if first else None)


def _ranks(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a number of ranks, 1 or more, is wanted")
    return int(text)


def _bytes(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a number of bytes, 1 or more, is wanted")
    return int(text)


_WORLDS = ("shared_memory", "collective", "mixed", "symmetric")  # as runtime.choosing has them, without torch
_TOPOLOGIES = {"nvlink": "NVLINK_NODE", "nvlink-infiniband": "NVLINK_INFINIBAND"}


def _topology(given: str | None) -> Topology | None:
    import shardweave
    from shardweave.errors import ArgumentError

    if given is None:
        return None
    if given in _TOPOLOGIES:
        return getattr(shardweave, _TOPOLOGIES[given])
    try:
        text = Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        allowed = ", ".join(_TOPOLOGIES)
        raise ArgumentError(
            f"--topology: {given!r} cannot be read: {error}; allowed: {allowed}, or a JSON file"
        ) from None
    return shardweave.Topology.from_json(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="shardweave", description="Redistribute tensors over a device mesh, by plan.")
    commands = parser.add_subparsers(dest="command", required=True)

    plan = commands.add_parser("plan", help="show how a tensor gets from one layout to another, and what it costs")
    plan.add_argument(
        "--mesh", type=_mesh_text, required=True, metavar="SIZES[@RANK]", help="such as 2,2, or 2,2@8 from rank 8 on"
    )
    plan.add_argument(
        "--target-mesh", type=_mesh_text, metavar="SIZES[@RANK]", help="the target's mesh, if it is another"
    )
    plan.add_argument("--shape", type=_sizes, required=True, help='global tensor shape, such as 8,6 ("" is a scalar)')
    plan.add_argument("--dtype", default="float32", help="such as bfloat16 (default: %(default)s)")
    plan.add_argument(
        "--topology",
        metavar="NAME|FILE",
        help=f"what links the ranks: {', '.join(_TOPOLOGIES)}, or a JSON file (default: bytes alone decide)",
    )
    plan.add_argument("--max-bytes", type=int, metavar="N", help="what a rank may hold at most")
    plan.add_argument(
        "--world",
        choices=_WORLDS,
        help="also say how ranks of such a world carry each step out, and why; mixed: on the topology's nodes",
    )
    plan.add_argument(
        "--backend", choices=("gloo", "nccl"), help="of the process groups of a collective world (default: gloo)"
    )
    plan.add_argument(
        "--reduction", choices=("ordered", "fast"), help="fast: a collective world's backend may reduce (default: no)"
    )
    plan.add_argument("--json", action="store_true", help="the program as JSON")
    plan.add_argument("--svg", type=Path, metavar="FILE", help="also draw the program there (up to 64 ranks)")
    plan.add_argument("source", help='layout, such as "S0 S1", "P S0" or "S0 S0 @ 0:1,0"')
    plan.add_argument("target", help="layout, in the same form")
    plan.set_defaults(run=_plan)

    dispatch = commands.add_parser("dispatch", help="what a token dispatcher takes: memory, and bytes on the wire")
    dispatch.add_argument("--ranks", type=_ranks, required=True, metavar="W")
    dispatch.add_argument("--experts", type=int, required=True, metavar="E")
    dispatch.add_argument("--top-k", type=int, required=True, metavar="K")
    dispatch.add_argument("--hidden", type=int, required=True, metavar="H", help="elements of a row")
    dispatch.add_argument("--tokens", type=int, required=True, metavar="T", help="a rank has at most")
    dispatch.add_argument("--dtype", default="bfloat16", help="(default: %(default)s)")
    dispatch.add_argument("--capacity", metavar="ROWS|FACTOR", help="of a rank's buffer (default: the worst case)")
    dispatch.add_argument("--expert-capacity", type=int, metavar="ROWS", help="of a group at most (default: no limit)")
    dispatch.add_argument("--align", type=int, default=1, metavar="ROWS", help="of groups (default: %(default)s)")
    dispatch.add_argument("--overflow", default="raise", help="raise or drop (default: %(default)s)")
    dispatch.add_argument("--layout", default="grouped", help="grouped or batched (default: %(default)s)")
    dispatch.add_argument("--save", default="lease", help="lease, redispatch or copy (default: %(default)s)")
    dispatch.add_argument("--leases", type=int, default=2, help="on a symmetric world (default: %(default)s)")
    dispatch.add_argument("--slab-capacity", metavar="ROWS|FACTOR", help="of ranks that send (default: an even share)")
    dispatch.add_argument("--splits", help="of ranks that send: host or slabs (default: by slab-capacity)")
    dispatch.add_argument("--json", dest="as_json", action="store_true", help="the same as JSON")
    dispatch.set_defaults(run=_dispatch)

    demo = commands.add_parser("demo", help="real models' redistributions, against stock DTensor, on this machine")
    demo.add_argument("--ranks", type=_ranks, default=4, help="processes to start (default: %(default)s)")
    demo.add_argument("--only", default="", metavar="TEXT", help="only the cases with this in their name")
    demo.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    demo.set_defaults(run=_demo)

    calibrate = commands.add_parser(
        "calibrate", help="measure what links the ranks: those of torchrun, or local ones; JSON for plan --topology"
    )
    calibrate.add_argument("--ranks", type=_ranks, help="processes to start, outside torchrun (default: 4)")
    calibrate.add_argument("--node-size", type=_ranks, metavar="N", help="pretend nodes of N ranks on one machine")
    calibrate.add_argument(
        "--world",
        choices=("shared_memory", "collective"),
        help="what ranks of a node meet in (default: as the library chooses)",
    )
    calibrate.add_argument("--out", type=Path, metavar="FILE", help="also write the topology there")
    calibrate.add_argument("--name", metavar="TEXT", help="the topology's name")
    calibrate.add_argument(
        "--largest", type=_bytes, metavar="BYTES", default=32 << 20, help="a rank sends at most (default: %(default)s)"
    )
    calibrate.set_defaults(run=_calibrate)

    record = commands.add_parser("record", help="run a script, and write down what its DTensors redistribute")
    record.add_argument(
        "-o", "--out", type=Path, metavar="FILE", default=Path("trace.json"), help="(default: %(default)s)"
    )
    record.add_argument("--install", action="store_true", help="run it on shardweave")
    record.add_argument("script", type=Path, help="a Python file; what follows are its own arguments")
    record.add_argument("arguments", nargs=argparse.REMAINDER)
    record.set_defaults(run=_record)

    replay = commands.add_parser("replay", help="carry a trace out again, by torch and by shardweave, and time both")
    replay.add_argument("traces", type=Path, nargs="+", metavar="TRACE", help="of the ranks of one run of a program")
    replay.add_argument("--device", choices=("cpu", "cuda"), help="that ranks have (default: cpu)")
    replay.add_argument("--world", choices=_WORLDS, help="that ranks meet in (default: as the library chooses)")
    replay.add_argument(
        "--topology",
        metavar="NAME|FILE",
        help=f"price both sides on it, and run nothing: {', '.join(_TOPOLOGIES)}, or a JSON file (default: run; "
        "programs of more ranks than start here: nvlink-infiniband)",
    )
    replay.add_argument("--scaled", action="store_true", help="with an eighth of every size of 64 and more")
    replay.add_argument("--only", default="", metavar="TEXT", help="only those with this in place or layouts")
    replay.add_argument("--most", type=_ranks, default=64, metavar="N", help="the heaviest N (default: %(default)s)")
    replay.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    replay.set_defaults(run=_replay)

    bench = commands.add_parser(
        "bench", help="measure ours beside others, checked first and in turns",
        epilog="What GPUs have to reach has a page of its own: make gpu, or python -m shardweave.bench.kernels.",
    )  # fmt: skip
    bench.add_argument(
        "suites", nargs="*", metavar="SUITE", help="redistribute, kernels, dispatch, host, plan (default: all)"
    )
    bench.add_argument("--quick", action="store_true", help="fewer cases and rounds, in minutes")
    bench.add_argument("--match", default="", metavar="TEXT", help="only the cases with this in their name")
    bench.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    bench.add_argument("--out", type=Path, metavar="DIR", help="also write JSON and Markdown to DIR/<kind of machine>/")
    bench.add_argument(
        "--check", action="store_true", help="compare with the committed results of this kind of machine, if any"
    )
    bench.set_defaults(run=_bench)

    compare = commands.add_parser("compare", help="two result files of bench: what got slower or faster beyond noise")
    compare.add_argument("before", type=Path, metavar="A.json")
    compare.add_argument("after", type=Path, metavar="B.json")
    compare.add_argument(
        "--threshold", type=float, default=0.1, metavar="PART", help="slower by less is none (default: %(default)s)"
    )
    compare.set_defaults(run=_compare)

    report = commands.add_parser("report", help="result files of bench as one HTML page, with pictures")
    report.add_argument("results", type=Path, nargs="+", metavar="RESULTS", help="files that bench --json has written")
    report.add_argument("-o", "--out", type=Path, default=Path("report.html"), help="(default: %(default)s)")
    report.add_argument(
        "--projection", type=Path, metavar="FILE", help="what python -m shardweave.bench.projection has written"
    )
    report.add_argument("--markdown", type=Path, metavar="FILE", help="also write the tables there")
    report.set_defaults(run=_report)

    doctor = commands.add_parser("doctor", help="what this machine has, which worlds ranks would use, what is off")
    doctor.add_argument("--json", type=Path, metavar="FILE", help="also write the findings there")
    doctor.set_defaults(run=_doctor)
    return parser


def _plan(arguments: argparse.Namespace) -> int:
    from shardweave import draw, plan
    from shardweave.errors import ArgumentError
    from shardweave.runtime.lowering import AssumedWorld, WindowPolicy, explain_on

    program = plan(
        _mesh(arguments.mesh),
        arguments.shape,
        arguments.dtype,
        arguments.source,
        arguments.target,
        target_mesh=None if arguments.target_mesh is None else _mesh(arguments.target_mesh),
        topology=_topology(arguments.topology),
        max_bytes=arguments.max_bytes,
    )
    if arguments.json and arguments.world is not None:
        raise ArgumentError("--world: given with --json, which says nothing of worlds; allowed: one of them")
    for option in ("backend", "reduction"):
        if getattr(arguments, option) is not None and arguments.world not in ("collective", "mixed"):
            raise ArgumentError(f"--{option}: without --world collective it says nothing; allowed: both")
    if arguments.json:
        print(json.dumps(program.to_dict(), indent=1))
    elif arguments.world is not None:
        node_size = program.topology.node_size if program.topology is not None else None
        if arguments.world == "mixed" and node_size is None:
            raise ArgumentError("--world mixed: of what nodes is not said; allowed: with a --topology of nodes")
        world = AssumedWorld(
            program.mesh,
            arguments.world in ("shared_memory", "symmetric"),
            arguments.backend or "gloo",
            WindowPolicy() if arguments.world == "symmetric" else None,
            node_size if arguments.world == "mixed" else None,
        )
        print(explain_on(program, world, arguments.reduction or "ordered"))
    else:
        print(program.explain())
    if arguments.svg is not None:
        try:
            arguments.svg.write_text(draw(program), encoding="utf-8")
        except OSError as error:
            raise ArgumentError(f"--svg: '{arguments.svg}' cannot be written: {error}; allowed: a file") from None
    return 0


def _dispatch(arguments: argparse.Namespace) -> int:
    from shardweave.bench.dispatch_plan import text

    print(text(**{name: value for name, value in vars(arguments).items() if name not in ("command", "run")}))
    return 0


def _has_rich(command: str) -> bool:
    try:
        import rich  # noqa: F401
    except ModuleNotFoundError:
        print(f"error: {command} needs rich: pip install 'shardweave[cli]'", file=sys.stderr)
        return False
    return True


def _demo(arguments: argparse.Namespace) -> int:
    if not _has_rich("the demo"):
        return 2
    from shardweave.bench.demo import run

    try:
        return run(arguments.ranks, arguments.only, arguments.json)
    except KeyboardInterrupt:
        return 130


def _calibrate(arguments: argparse.Namespace) -> int:
    if not _has_rich("calibrate"):
        return 2
    from shardweave.bench.calibrate import run

    try:
        return run(
            arguments.ranks, arguments.node_size, arguments.world, arguments.out, arguments.name, arguments.largest
        )
    except KeyboardInterrupt:
        return 130


def _record(arguments: argparse.Namespace) -> int:
    import shardweave

    if not arguments.script.is_file():
        from shardweave.errors import ArgumentError

        raise ArgumentError(f"script: {str(arguments.script)!r} is no file; allowed: a Python file")
    # As `python script …` would have it.
    sys.argv = [str(arguments.script), *arguments.arguments]
    sys.path.insert(0, str(arguments.script.absolute().parent))
    with shardweave.record(arguments.out):
        if arguments.install:
            shardweave.install()
        runpy.run_path(str(arguments.script), run_name="__main__")
    return 0


def _replay(arguments: argparse.Namespace) -> int:
    if not _has_rich("replay"):
        return 2
    from shardweave.bench.replay import Options, run

    options = Options(
        arguments.device,
        arguments.world,
        _topology(arguments.topology),
        arguments.scaled,
        arguments.only,
        arguments.most,
        arguments.json,
    )
    try:
        return run(arguments.traces, options)
    except KeyboardInterrupt:
        return 130


def _bench(arguments: argparse.Namespace) -> int:
    from shardweave.bench.compare_results import THRESHOLD
    from shardweave.bench.run import run

    scale = "quick" if arguments.quick else "full"
    try:
        return run(arguments.suites, scale, arguments.match, arguments.json, arguments.out, arguments.check, THRESHOLD)
    except KeyboardInterrupt:
        return 130


def _compare(arguments: argparse.Namespace) -> int:
    from shardweave.bench.compare_results import run

    return run(arguments.before, arguments.after, arguments.threshold)


def _report(arguments: argparse.Namespace) -> int:
    from shardweave.bench.html_report import run

    return run(arguments.results, arguments.out, arguments.projection, arguments.markdown)


def _doctor(arguments: argparse.Namespace) -> int:
    if not _has_rich("the doctor"):
        return 2
    from shardweave.bench.doctor import run

    try:
        return run(arguments.json)
    except KeyboardInterrupt:
        return 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 2 for a bad argument, 1 for a fault that was found or ranks that were lost."""
    from shardweave.errors import ShardweaveError

    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except ShardweaveError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
