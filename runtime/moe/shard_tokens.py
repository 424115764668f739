"""Shares of tokens that are replicated over a mesh dim, as beside tensor parallelism: each rank dispatches one."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ...errors import ArgumentError, UnsupportedError, shown
from ..dtensor.redistribute import redistribute

_MOST_TOKENS = 1 << 40


def shard_tokens(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return this rank's rows of a tensor that is replicated over a 1-D mesh.

    Rows are split as by torch.chunk: the last ranks may have fewer, or none.

    Args:
        x: [T, ...], equal on all ranks of the mesh.

    Returns:
        [T_share, ...]. Its gradient is gathered, so that the gradient of `x` is equal on all ranks.

    Raises:
        ArgumentError: a mesh of several dims, or a tensor of no dims.
        UnsupportedError: a mesh whose ranks do not ascend.
        TransportError: in backward, a rank timed out or failed.
    """
    _check(x, mesh)
    whole = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    return redistribute(whole, [Shard(0)]).to_local()


def gather_tokens(y: torch.Tensor, mesh: DeviceMesh, tokens: int) -> torch.Tensor:
    """Gather the shares of `shard_tokens` on every rank of the mesh.

    Args:
        y: [T_share, ...], this rank's share.
        tokens: T, of all shares together.

    Returns:
        [T, ...]. Its gradient is taken as replicated: each rank uses its own share of it.

    Raises:
        ArgumentError: a mesh of several dims; a negative or non-integer `tokens`; a share of another size than this
            rank's.
        UnsupportedError: a mesh whose ranks do not ascend.
        TransportError: a rank timed out or failed.
    """
    _check(y, mesh)
    if not isinstance(tokens, int) or isinstance(tokens, bool) or not 0 <= tokens <= _MOST_TOKENS:
        raise ArgumentError(f"tokens: {shown(tokens)}; allowed: a whole number from 0 to 2**40")
    shape = torch.Size((tokens, *y.shape[1:]))
    each = -(-tokens // mesh.size()) if tokens else 0
    at = mesh.get_local_rank() * each
    share = max(min(tokens - at, each), 0)
    if len(y) != share:
        raise ArgumentError(f"y: {len(y)} rows; allowed: {share}, this rank's share of {tokens} tokens")
    stride = tuple(math.prod(max(n, 1) for n in shape[d + 1 :]) for d in range(len(shape)))
    shared = DTensor.from_local(y, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
    return redistribute(shared, [Replicate()]).to_local()


def _check(x: torch.Tensor, mesh: DeviceMesh) -> None:
    if not dist.is_initialized():
        raise UnsupportedError("shares of tokens: torch.distributed is not initialised; call init_process_group first")
    if not isinstance(mesh, DeviceMesh):
        raise ArgumentError(f"mesh: {shown(mesh)}; allowed: a 1-D DeviceMesh, such as mesh['tp']")
    if not isinstance(x, torch.Tensor):
        raise ArgumentError(f"{shown(x)} instead of a tensor; allowed: one whose rows are tokens")
    if mesh.ndim != 1:
        raise ArgumentError(f"mesh: {mesh.ndim} dims; allowed: 1, such as mesh['tp']")
    if x.dim() == 0:
        raise ArgumentError("a tensor of no dims; allowed: one whose rows are tokens")
