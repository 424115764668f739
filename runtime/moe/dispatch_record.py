"""DispatchRecord: everything a rank knows about one dispatch, except the rows themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...kernels import Groups, TokenRows
from .config import DispatchConfig


class Tokens(NamedTuple):
    """The arguments of a dispatch on one rank."""

    x: torch.Tensor
    """[T, H]."""
    ids: torch.Tensor
    """int32 or int64 [T, K]."""
    weights: torch.Tensor
    """float32 [T, K]."""


class Chunks(NamedTuple):
    """The chunks of one dispatch on a two-sided transport: their sizes, and the places of received rows."""

    sizes: torch.Tensor
    """int64 [2 W + 1], on the host, as `chunk_sizes` returns them."""
    places: torch.Tensor
    """int64: the place in this rank's buffer of each received row, by source. Chunks of exact size: [rows], followed by
    the padding rows and zeros. Chunks of fixed size: [W * chunk_capacity], -1 for none."""


def chunk_sizes(chunks: Chunks) -> tuple[list[int], list[int], int]:
    """Return the rows sent to each destination, together those of TokenRows; the rows received from each source; and
    the padding rows of this rank's buffer."""
    *sizes, padding = chunks.sizes.tolist()
    ranks = len(sizes) // 2
    return sizes[:ranks], sizes[ranks:], padding


class Forwards(NamedTuple):
    """The tokens of one dispatch that cross between nodes: those that this rank sends to a rank of each other node that
    has experts of them, and those that it forwards to the ranks of its own node. Pairs are those that have a row."""

    sends: torch.Tensor
    """int64 [W], on the host: tokens to each rank that forwards them; together n."""
    receives: torch.Tensor
    """int64 [W], on the host: tokens from each rank that this one forwards them for; together F."""
    token: torch.Tensor
    """int64 [n]: the tokens sent, by node, ascending; with chunks of fixed size, n counts places, those
    without a token have any token, but no pairs. Further elements are ignored, as in the tensors with F rows."""
    key: torch.Tensor
    """int32 [F, K]: `TokenRows.key` of the forwarded tokens on the ranks of this node, by source."""
    row: torch.Tensor
    """int32 [F, K]: likewise `TokenRows.row`."""
    weights: torch.Tensor
    """float32 [F, K], of the forwarded tokens."""


class Deduped(NamedTuple):
    """The rows of tokens that cross once for each rank: slot s * max_tokens + t of a rank is for token t of rank s."""

    once: torch.Tensor
    """int32 [T, K]: with the keys of `DispatchRecord.rows`, the place of each sum among those that this rank receives
    from a destination: t for the token's first pair there, -1 for its other pairs."""
    row: torch.Tensor
    """int32 [W * max_tokens, K]: the rows of each token on this rank, in order of k; -1 for its other pairs."""
    weight: torch.Tensor
    """float32 [W * max_tokens, K]: the weights of these pairs."""


class DispatchRecord(NamedTuple):
    """Everything a rank knows about one dispatch, except the rows themselves. Combine and backward take it whole."""

    weights: torch.Tensor
    """float32 [rows], of the received rows."""
    groups: Groups
    rows: TokenRows
    """With `chunks`, the rows in this rank's chunks, else those in the destinations' buffers. With `forwards` only
    those on this node; without `chunks` its ranks are the destinations then."""
    matrix: torch.Tensor
    """int32 [W, S + 1]: pairs of each physical expert by source rank; the last column counts bad ids."""
    chunks: Chunks | None = None
    """Two-sided transports only. With `forwards` those between the ranks of a node."""
    forwards: Forwards | None = None
    """On two levels only."""
    deduped: Deduped | None = None
    """With `dedupe` only."""
    scale: torch.Tensor | None = None
    """The second payload of the received rows, as integers, if it was copied out as they arrived: as `Columns.out`.
    Not among `tensors`, since neither combine nor backward reads it."""

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors, `weights` first, for interfaces that take tensors only: autograd's and operators'."""
        travel = *(self.chunks or ()), *(self.forwards or ()), *(self.deduped or ())
        return [self.weights, *self.groups, self.rows.key, self.rows.row, self.matrix, *travel]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> DispatchRecord:
        """Return the record of `tensors()`."""
        weights, *rest = tensors
        n = len(Groups._fields)
        groups, (key, row, matrix, *travel) = rest[:n], rest[n:]
        of_chunks, of_forwards = len(Chunks._fields), len(Forwards._fields)
        chunks = Chunks(*travel[:of_chunks]) if len(travel) in (of_chunks, of_chunks + of_forwards) else None
        forwards = Forwards(*travel[-of_forwards:]) if len(travel) >= of_forwards else None
        deduped = Deduped(*travel) if len(travel) == len(Deduped._fields) else None
        return cls(weights, Groups(*groups), TokenRows(key, row), matrix, chunks, forwards, deduped)


def empty_record(
    config: DispatchConfig,
    me: int,
    tokens: int,
    weights: torch.Tensor,
    in_chunks: bool,
    two_level: bool = False,
    deduped: bool = False,
) -> DispatchRecord:
    """Return a record of uninitialised memory, for operators to write into: of the largest size, where the size is not
    known before.

    Args:
        me: this rank, 0 to W - 1.
        tokens: T.
        weights: float32 [rows], on the device of the dispatcher.
    """
    physical_experts, own = config.bounds[-1], config.bounds[me + 1] - config.bounds[me]

    def empty(*shape: int, dtype: torch.dtype = torch.int32, device: torch.device = weights.device) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    groups = Groups(
        start=empty(physical_experts),
        limit=empty(physical_experts),
        offsets=empty(own),
        counts=empty(own, dtype=torch.int64),
        padded_counts=empty(own, dtype=torch.int64),
        num_rows=empty(1),
        overflow=empty(2, dtype=torch.int64),
    )
    rows = TokenRows(empty(tokens, config.top_k), empty(tokens, config.top_k))
    matrix, chunks = empty(config.ranks, physical_experts + 1), None
    if in_chunks:
        host = torch.device("cpu")
        places = config.rows if config.chunk_rows is None else config.ranks * config.chunk_rows
        chunks = Chunks(
            sizes=empty(2 * config.ranks + 1, dtype=torch.int64, device=host),
            places=empty(places, dtype=torch.int64),
        )
    if deduped:
        return DispatchRecord(weights, groups, rows, matrix, deduped=empty_deduped(config, rows.key))
    if not two_level or config.node_ranks is None:
        return DispatchRecord(weights, groups, rows, matrix, chunks)
    nodes, k = config.node_ranks, config.top_k
    most = len(nodes.sources(me)) * config.max_tokens
    host, sent = torch.device("cpu"), tokens * min(k, len(nodes.members) - 1)
    if config.chunk_rows is not None:
        sent = sum(nodes.token_places(config.max_tokens, config.chunk_rows))
    forwards = Forwards(
        sends=empty(config.ranks, dtype=torch.int64, device=host),
        receives=empty(config.ranks, dtype=torch.int64, device=host),
        token=empty(sent, dtype=torch.int64),
        key=empty(most, k),
        row=empty(most, k),
        weights=empty(most, k, dtype=torch.float32),
    )
    return DispatchRecord(weights, groups, rows, matrix, chunks, forwards)


def empty_deduped(config: DispatchConfig, key: torch.Tensor) -> Deduped:
    """Return uninitialised memory; `key`: `TokenRows.key`."""
    row = key.new_empty(config.ranks * config.max_tokens, config.top_k)
    return Deduped(torch.empty_like(key), row, torch.empty_like(row, dtype=torch.float32))
