"""`python -m shardweave dispatch`: memory and bytes on the wire of a token dispatcher, without its ranks."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ..errors import ArgumentError, shown
from ..kernels.tokens.rows import PAYLOADS
from ..runtime.moe.config import DispatchConfig
from ..runtime.moe.report import explain, to_dict
from ..runtime.moe.transfer.fixed import FixedTransfer
from ..runtime.moe.transfer.push import PushTransfer
from ..runtime.moe.transfer.sendrecv import SendRecvTransfer
from ..runtime.moe.transfer.window import WindowTransfer
from .output_streams import print_wrapped
from .parsing import dtype, number_of, whole_number

ALGORITHMS = (PushTransfer, WindowTransfer, SendRecvTransfer, FixedTransfer)


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
    parser.add_argument("--json", dest="as_json", action="store_true", help="print JSON")


def main(arguments: argparse.Namespace) -> int:
    """Print settings, memory and bytes on the wire of every algorithm.

    Raises:
        ArgumentError: a setting that a dispatcher does not allow.
    """
    given = arguments
    config = DispatchConfig(
        given.ranks, num_experts=given.experts, top_k=given.top_k, hidden=given.hidden, max_tokens=given.tokens,
        dtype=_dtype(given.dtype), capacity=_capacity("capacity", given.capacity),
        expert_capacity=given.expert_capacity, align=given.align, overflow=given.overflow, layout=given.layout,
        save=given.save, pooled_buffers=given.pooled_buffers,
        chunk_capacity=_capacity("chunk_capacity", given.chunk_capacity),
    )  # fmt: skip
    if given.top_k > given.experts:  # a dispatcher takes that, since ids may be -1; a token's experts here differ
        raise ArgumentError(f"top_k: {given.top_k} of {given.experts} experts; allowed: up to {given.experts}")
    if given.as_json:
        print(json.dumps(to_dict(config, ALGORITHMS), indent=1))
        return 0
    print_wrapped(explain(config, ALGORITHMS))
    return 0


def _dtype(name: str) -> Any:
    dtypes = {str(dtype).removeprefix("torch."): dtype for dtype in PAYLOADS}
    return dtypes.get(name, name)


def _capacity(name: str, given: str | None) -> int | float | None:
    if given is None:
        return None
    try:
        return int(given) if given.lstrip("+-").isdecimal() else float(given)
    except ValueError:
        raise ArgumentError(
            f"{name}: {shown(given)}; allowed: rows, such as 4096, or a factor of a rank's rows, such as 1.25"
        ) from None
