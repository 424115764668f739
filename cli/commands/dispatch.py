"""`python -m shardweave dispatch`: memory and bytes on the wire of a token dispatcher."""

from __future__ import annotations

import argparse

from ..output_streams import print_wrapped
from .parsing import dtype, number_of, whole_number

HELP = "print the memory and the bytes on the wire of a token dispatcher"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=number_of("ranks"), required=True, metavar="W", help="ranks of the dispatcher")
    parser.add_argument("--experts", type=whole_number, required=True, metavar="E", help="experts of all ranks")
    parser.add_argument("--top-k", type=whole_number, required=True, metavar="K", help="experts of a token")
    parser.add_argument("--hidden", type=whole_number, required=True, metavar="H", help="elements of a row")
    parser.add_argument("--tokens", type=whole_number, required=True, metavar="T", help="maximum tokens of a rank")
    parser.add_argument("--dtype", type=dtype, default="bfloat16", help="or bf16 and the like (default: %(default)s)")
    parser.add_argument("--capacity", metavar="ROWS|FACTOR", help="size of a rank's buffer (default: the worst case)")
    parser.add_argument(
        "--expert-capacity", type=whole_number, metavar="ROWS", help="maximum rows of a group (default: unlimited)"
    )
    parser.add_argument(
        "--align", type=whole_number, default=1, metavar="ROWS", help="alignment of groups (default: %(default)s)"
    )
    parser.add_argument("--overflow", default="raise", help="raise or drop (default: %(default)s)")
    parser.add_argument("--layout", default="grouped", help="grouped or batched (default: %(default)s)")
    parser.add_argument("--save", default="buffer", help="buffer, redispatch or copy (default: %(default)s)")
    parser.add_argument(
        "--pooled-buffers",
        type=whole_number,
        default=1,
        metavar="N",
        help="receive buffers with device-side synchronisation (default: %(default)s)",
    )
    parser.add_argument("--chunk-capacity", metavar="ROWS|FACTOR", help="two-sided transports: rows of a chunk")
    parser.add_argument("--splits", help="two-sided transports: host or fixed (default: by --chunk-capacity)")
    parser.add_argument("--json", dest="as_json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    from ..dispatch_plan import text

    print_wrapped(text(**{name: value for name, value in vars(arguments).items() if name != "command"}))
    return 0
