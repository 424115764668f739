"""A token dispatcher's settings, memory and bytes on the wire, as text and as JSON values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ...planner import reached_shares
from .config import DispatchConfig
from .transfer.base import TokenTransfer, pair_words

Algorithm = TokenTransfer | type[TokenTransfer]
"""How rows travel: a transfer, or its class."""


def explain(config: DispatchConfig, algorithms: Sequence[Algorithm], transport: str | None = None) -> str:
    """Return the settings, and for each algorithm the memory and the bytes on the wire of each rank, as text."""
    experts = config.experts_per_rank
    each = f"{experts[0]}" if min(experts) == max(experts) else f"{min(experts)} to {max(experts)}"
    over = f"{config.ranks} rank{'' if config.ranks == 1 else 's'}{f', {transport}' if transport else ''}"
    lines = [
        f"token dispatch over {over}: {config.num_experts} experts as "
        f"{config.bounds[-1]} physical experts, {each} per rank; top {config.top_k}, hidden {config.hidden}, "
        f"{_name(config)}",
        f"  {config.rows} rows per rank "
        f"(all tokens of all ranks: {config.ranks * config.most_pairs}), aligned to {config.align}, {config.layout}",
        f"  expert capacity: {config.expert_capacity if config.expert_capacity is not None else 'unlimited'}; "
        f"overflow: {config.overflow}; save: {config.save}",
    ]
    if config.zero_rows is not None:
        lines.append(f"  rows from num_rows on are {'zero' if config.zero_rows else 'not initialised'}")
    if config.packed is not None:
        lines.append(f"  dispatch sends {config.dispatched_nbytes} bytes a row: {config.packed}")
    if config.packed_output is not None:
        lines.append(f"  combine sends {config.combined_nbytes} bytes a row: {config.packed_output}")
    for algorithm in algorithms:
        capacity = _chunk_capacity(config, algorithm)
        memory, wire = algorithm.nbytes(config, capacity), on_wire(config, algorithm, capacity)
        once, of_each = algorithm.layers_nbytes(config, capacity)
        # What pooled buffers save is part of the first number.
        pooled = algorithm.in_windows and not algorithm.deduped and config.pooled_buffers > 1
        most = f", n from {config.pooled_buffers} on" if pooled else ""
        place = "between nodes" if algorithm.two_level else "on the wire"
        lines += [
            f"  {algorithm.algorithm}" + ("" if capacity is None else f" (chunk_capacity={capacity})"),
            "    memory of a rank, maximum bytes:",
            *[f"      {nbytes:>16,}  {purpose}" for purpose, nbytes in memory.items()],
            f"    a model with n of these layers, in training: {once:,} + n * {of_each:,}{most}",
            f"    {place}, bytes for the {config.max_tokens} tokens of one rank: with even routing, and at most:",
            *_table(wire),
        ]
        if algorithm.two_level and (algorithm.in_chunks or algorithm.in_windows):
            moved = "sends" if algorithm.in_chunks else "writes or reads in windows"
            lines += [
                f"    inside a node, bytes that a rank {moved} for itself and those whose tokens it forwards:",
                *_table(inside_node(config, algorithm, capacity)),
            ]
    return "\n".join(lines)


def _table(wire: dict[str, tuple[int, int]]) -> list[str]:
    return [f"      {even:>16,} {most:>16,}  {operation}" for operation, (even, most) in wire.items()]


def _chunk_capacity(config: DispatchConfig, algorithm: Algorithm) -> int | None:
    """Return the rows of a chunk of fixed size: the dispatcher's, else room for all rows of a rank."""
    if not algorithm.fixed_size:
        return None
    return config.most_pairs if config.chunk_rows is None else config.chunk_rows


def to_dict(config: DispatchConfig, algorithms: Sequence[Algorithm]) -> dict[str, Any]:
    """Return the contents of `explain` as JSON values."""
    return {
        "ranks": config.ranks,
        "num_experts": config.num_experts,
        "top_k": config.top_k,
        "hidden": config.hidden,
        "max_tokens": config.max_tokens,
        "dtype": _name(config),
        "rows": config.rows,
        "expert_capacity": config.expert_capacity,
        "align": config.align,
        "layout": config.layout,
        "overflow": config.overflow,
        "save": config.save,
        "pooled_buffers": config.pooled_buffers,
        "zero_rows": config.zero_rows,
        "algorithms": [
            {
                "algorithm": algorithm.algorithm,
                "chunk_capacity": capacity,
                "memory": algorithm.nbytes(config, capacity),
                "layers": dict(zip(("once", "each"), algorithm.layers_nbytes(config, capacity), strict=True)),
                "wire": {
                    operation: {"even": even, "most": most}
                    for operation, (even, most) in on_wire(config, algorithm, capacity).items()
                },
            }
            for algorithm in algorithms
            for capacity in [_chunk_capacity(config, algorithm)]
        ],
    }


def on_wire(
    config: DispatchConfig, algorithm: Algorithm, chunk_capacity: int | None = None
) -> dict[str, tuple[int, int]]:
    """Return the bytes sent between ranks for the max_tokens tokens of one rank by operation: with even routing, and at
    most.

    Counts rows, weights and counts, but not the few bytes of barriers. Chunks of `chunk_capacity` rows travel whole. On
    two levels only bytes between nodes count.
    """
    if algorithm.two_level:
        return _between_nodes(config, algorithm.in_chunks or algorithm.in_windows, chunk_capacity)
    row, others = config.hidden * config.dtype.itemsize, config.ranks - 1
    # For each physical expert this rank's count, and its bad ids.
    counts = others * (config.bounds[-1] + 1 + algorithm.extra_words) * 4
    # Tokens are dispatched once more for the experts' backward.
    again = row if config.save == "redispatch" else 0
    if algorithm.deduped:
        return _once_per_rank(config, counts, row, again)
    even, most = _pairs_sent(config) if chunk_capacity is None else ((config.ranks - 1) * chunk_capacity,) * 2
    return _of_operations(config, even, most, counts)


def _of_operations(config: DispatchConfig, even: int, most: int, counts: int) -> dict[str, tuple[int, int]]:
    """Return the bytes of `even` and of `most` rows, with what travels beside them, by operation; `counts`: bytes."""
    row = config.hidden * config.dtype.itemsize
    # Tokens are dispatched once more for the experts' backward.
    again = row if config.save == "redispatch" else 0
    per_pair = {
        "dispatch": (config.dispatched_nbytes + 4, counts),
        "combine": (config.combined_nbytes, 0),
        "backward of combine": (row + again, 0),
        "backward of dispatch": (row + 4, 0),
    }
    return {operation: (even * each + once, most * each + once) for operation, (each, once) in per_pair.items()}


def inside_node(config: DispatchConfig, algorithm: Algorithm, chunk_capacity: int | None) -> dict[str, tuple[int, int]]:
    """Return `on_wire` of what goes from a rank to others of its node on two levels, in messages or through windows, of
    the rank that sends most."""
    ranks, pairs = config.node_ranks, config.most_pairs
    assert ranks is not None
    even = most = 0
    for rank, node in enumerate(ranks.nodes):
        others, brought = len(ranks.members[node]) - 1, 1 + len(ranks.sources(rank))
        if algorithm.in_chunks and chunk_capacity is not None:
            even = most = max(most, others * brought * chunk_capacity)
        else:
            even = max(even, brought * math.ceil(pairs * others / config.ranks))
            most = max(most, brought * pairs * (others > 0))
    words = _counts_words(config, chunk_capacity) + algorithm.extra_words
    counts = max(len(members) - 1 for members in ranks.members) * words * 4
    return _of_operations(config, even, most, counts)


def _counts_words(config: DispatchConfig, chunk_capacity: int | None) -> int:
    """Return the words that a rank sends with its counts on two levels: the number of tokens as well, if it varies."""
    return config.bounds[-1] + (2 if chunk_capacity is None else 1)


def _once_per_rank(config: DispatchConfig, counts: int, row: int, again: int) -> dict[str, tuple[int, int]]:
    """Return `on_wire` with `dedupe`; counts, row, again: bytes of a rank's counts, of a token in `dtype`, and of one
    that is dispatched again."""
    experts = config.experts_per_rank
    shares = reached_shares(experts, config.top_k)
    pairs, most_pairs = _pairs_sent(config)
    tokens = min(math.ceil(config.max_tokens * (sum(shares) - min(shares))), pairs)
    most_tokens = min(config.max_tokens * (config.ranks - 1), most_pairs)
    tables = (config.ranks - 1) * config.max_tokens * config.top_k * 8
    per_token = {
        "dispatch": (config.dispatched_nbytes, 0, counts + tables),
        "combine": (row, 0, 0),
        "backward of combine": (row + again, 0, tables if again else 0),
        "backward of dispatch": (row, 4, 0),
    }
    return {
        operation: (tokens * each + pairs * beside + once, most_tokens * each + most_pairs * beside + once)
        for operation, (each, beside, once) in per_token.items()
    }


def _between_nodes(config: DispatchConfig, to_all: bool, chunk_capacity: int | None) -> dict[str, tuple[int, int]]:
    """Return `on_wire` of two levels; to_all: a rank sends its counts to all ranks of other nodes."""
    ranks, k = config.node_ranks, config.top_k
    assert ranks is not None
    shares = [len(members) / config.ranks for members in ranks.members]
    reached = [1 - (1 - share) ** k for share in shares]  # of the tokens, those with an expert on each node
    even = math.ceil(config.max_tokens * (sum(reached) - min(reached)))
    most = ranks.most_sent(config.max_tokens, k, chunk_capacity)
    if chunk_capacity is not None:
        even = most
    row = config.hidden * config.dtype.itemsize
    again = row if config.save == "redispatch" else 0
    peers = config.ranks - min(map(len, ranks.members)) if to_all else len(shares) - 1
    per_token = {
        "dispatch": (config.dispatched_nbytes + pair_words(k) * 4, peers * _counts_words(config, chunk_capacity) * 4),
        "combine": (row, 0),
        "backward of combine": (row + again, 0),
        "backward of dispatch": (row + 4 * k, 0),
    }
    return {operation: (even * each + once, most * each + once) for operation, (each, once) in per_token.items()}


def _pairs_sent(config: DispatchConfig) -> tuple[int, int]:
    """Return the pairs of one rank that have a row on another rank: with even routing, of the rank that sends most, and
    at most."""
    pairs, physical_experts = config.most_pairs, config.bounds[-1]
    experts = config.experts_per_rank
    limit = config.rows if config.expert_capacity is None else config.expert_capacity
    room = [min(config.rows, n * limit) for n in experts]
    # All sources share a destination's room.
    received = [
        min(-(-pairs * n // physical_experts), -(-space // config.ranks))
        for n, space in zip(experts, room, strict=True)
    ]
    return min(pairs, sum(received) - min(received)), min(pairs, sum(room) - min(room))


def _name(config: DispatchConfig) -> str:
    return str(config.dtype).removeprefix("torch.")
