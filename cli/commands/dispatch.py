"""`python -m shardweave dispatch`: what a token dispatcher takes: memory, and bytes on the wire."""

from __future__ import annotations

import argparse

from .parsing import dtype, number_of, whole_number

HELP = "what a token dispatcher takes: memory, and bytes on the wire"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=number_of("ranks"), required=True, metavar="W")
    parser.add_argument("--experts", type=whole_number, required=True, metavar="E")
    parser.add_argument("--top-k", type=whole_number, required=True, metavar="K")
    parser.add_argument("--hidden", type=whole_number, required=True, metavar="H", help="elements of a row")
    parser.add_argument("--tokens", type=whole_number, required=True, metavar="T", help="a rank has at most")
    parser.add_argument("--dtype", type=dtype, default="bfloat16", help="or bf16 and the like (default: %(default)s)")
    parser.add_argument("--capacity", metavar="ROWS|FACTOR", help="of a rank's buffer (default: the worst case)")
    parser.add_argument(
        "--expert-capacity", type=whole_number, metavar="ROWS", help="of a group at most (default: no limit)"
    )
    parser.add_argument(
        "--align", type=whole_number, default=1, metavar="ROWS", help="of groups (default: %(default)s)"
    )
    parser.add_argument("--overflow", default="raise", help="raise or drop (default: %(default)s)")
    parser.add_argument("--layout", default="grouped", help="grouped or batched (default: %(default)s)")
    parser.add_argument("--save", default="lease", help="lease, redispatch or copy (default: %(default)s)")
    parser.add_argument(
        "--leases",
        type=whole_number,
        default=1,
        metavar="N",
        help="of ranks that meet on the device (default: %(default)s)",
    )
    parser.add_argument("--slab-capacity", metavar="ROWS|FACTOR", help="of ranks that send (default: an even share)")
    parser.add_argument("--splits", help="of ranks that send: host or slabs (default: by slab-capacity)")
    parser.add_argument("--json", dest="as_json", action="store_true", help="the same as JSON")


def run(arguments: argparse.Namespace) -> int:
    from ..dispatch_plan import text

    print(text(**{name: value for name, value in vars(arguments).items() if name != "command"}))
    return 0
