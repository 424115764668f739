"""Tokens that the ranks of a mesh dim hold alike, as beside tensor parallelism: each dispatches a share of them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ...errors import ArgumentError, UnsupportedError, shown
from ..dtensor.redistribute import redistribute

_MOST_TOKENS = 1 << 40


def share_of_tokens(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's rows of a tensor that all ranks of a 1-D mesh hold alike: by torch.chunk's rule, so that the last
    ranks may have fewer, or none.

    Args:
        x: [T, ...], the same on all of them.

    Returns:
        [T_share, ...]. Its gradient is gathered: that of `x` is the same on all of them again.

    Raises:
        ArgumentError: a mesh of several dims, a tensor without rows.
        UnsupportedError: a mesh whose ranks do not ascend.
        TransportError: in backward, a rank did not come.
    """
    _check(x, mesh)
    whole = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    return redistribute(whole, [Shard(0)]).to_local()


def whole_of_shares(y: torch.Tensor, mesh: DeviceMesh, tokens: int) -> torch.Tensor:
    """All rows of the shares that `share_of_tokens` gave, on every rank of the mesh.

    Args:
        y: [T_share, ...], this rank's.
        tokens: T, of all shares together.

    Returns:
        [T, ...]. Ranks that hold tokens alike go on alike, so of its gradient each takes its own share.

    Raises:
        ArgumentError: a mesh of several dims; `tokens` that are no whole number from 0 on; a share that is not this
            rank's of so many tokens.
        UnsupportedError: a mesh whose ranks do not ascend.
        TransportError: a rank did not come.
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
    stride = torch.empty(shape, device="meta").stride()
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
