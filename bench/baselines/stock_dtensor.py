"""One redistribution by stock DTensor and by shardweave in the same ranks, to be checked and then timed in turns.

The oracle is independent of both: a rank's part is cut from the whole tensor as `torch.chunk` cuts, and a partial
source is summed in float64.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard, _StridedShard

import shardweave

from ..workloads import Workload

ROUNDS = 7


class Unsuitable(ValueError):
    """A case that this mesh cannot carry."""


def mesh_for(size: int) -> tuple[int, int]:
    """The two factors of `size` that are closest to each other, the smaller first."""
    first = next(factor for factor in range(math.isqrt(size), 0, -1) if size % factor == 0)
    return first, size // first


def respell(text: str, mesh_from: tuple[int, ...], mesh_to: tuple[int, ...]) -> str:
    """The same order on a mesh of other sizes: `S0/2 S0` means "second mesh dim first" only where that has size 2."""
    tokens = text.split()
    for place, token in enumerate(tokens):
        base, slash, factor = token.partition("/")
        if slash and int(factor) != math.prod(mesh_from[place + 1 :]):
            raise Unsuitable(f"{text!r} is no shard order on mesh {mesh_from}")
        if slash:
            tokens[place] = f"{base}/{math.prod(mesh_to[place + 1 :])}"
    return " ".join(tokens)


def moves(workload: Workload, mesh: tuple[int, int]) -> bool:
    """Whether anything moves between ranks in a case on a mesh of such sizes."""
    try:
        layouts = [respell(text, workload.mesh, mesh) for text in (workload.source, workload.target)]
    except Unsuitable:
        return False
    return any(shardweave.plan(mesh, workload.shape, workload.dtype, *layouts).bytes_received)


def placements(text: str) -> list[Placement]:
    """torch's own spelling of a layout in text form."""
    result: list[Placement] = []
    for token in text.split():
        base, slash, factor = token.partition("/")
        if token in ("R", "P"):
            result.append(Partial() if token == "P" else Replicate())
        elif base[0] != "S" or not base[1:].isdigit() or factor.isdigit() != bool(slash):
            raise ValueError(f"layout {text!r}: {token!r} is none of R, P, S<dim>, S<dim>/<split factor>")
        else:
            result.append(_StridedShard(int(base[1:]), split_factor=int(factor)) if slash else Shard(int(base[1:])))
    return result


def held(
    text: str,
    mesh: tuple[int, ...],
    coordinate: Sequence[int],
    shape: tuple[int, ...],
    order: Sequence[int] | None = None,
) -> list[slice]:
    """The oracle: which part of each tensor dim the rank at `coordinate` holds.

    A strided token stands for an order: the mesh dims to its right cut first. `order`: all mesh dims, the first to cut
    first, where the text has no strided token and they do not cut from left to right.
    """
    tokens = text.split()
    ranges = [slice(0, size) for size in shape]
    if order is None:
        order = [m for m, token in enumerate(tokens) if "/" not in token]
        order += [m for m in reversed(range(len(tokens))) if "/" in tokens[m]]
    for m in order:
        if tokens[m][0] == "S":
            dim = int(tokens[m][1:].partition("/")[0])
            start, size = ranges[dim].start, ranges[dim].stop - ranges[dim].start
            chunk = -(-size // mesh[m])
            low, high = min(chunk * coordinate[m], size), min(chunk * (coordinate[m] + 1), size)
            ranges[dim] = slice(start + low, start + high)
    return ranges


class Case:
    """A workload on this rank: its source, its target, and how far an output may be from the truth."""

    def __init__(self, workload: Workload, mesh: DeviceMesh) -> None:
        sizes = tuple(mesh.shape)
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        self.name = workload.name
        self.dtype = getattr(torch, workload.dtype)
        self.shape = workload.shape
        self.source_text = respell(workload.source, workload.mesh, sizes)
        self.target_text = respell(workload.target, workload.mesh, sizes)
        self.placements = placements(self.target_text)
        self.box = held(self.target_text, sizes, coordinate, self.shape)
        summed = [m for m, token in enumerate(workload.source.split()) if token == "P"]
        self.terms = math.prod(sizes[m] for m in summed)
        mine = sum(coordinate[m] * math.prod(sizes[n] for n in summed if n > m) for m in summed)

        exact = torch.zeros(self._size(self.box), dtype=torch.float64 if summed else self.dtype)
        magnitude = torch.zeros_like(exact) if summed else None
        for term in range(self.terms):
            whole = self._whole(term)
            if term == mine:
                local = whole[tuple(held(self.source_text, sizes, coordinate, self.shape))].clone()
            part = whole[tuple(self.box)]
            if magnitude is None:
                exact = part.clone()
            else:
                exact += part
                magnitude += part.abs()
        self.exact, self.magnitude = exact, magnitude
        stride = torch.empty(self.shape, device="meta").stride()
        self.source = DTensor.from_local(
            local, mesh, placements(self.source_text), run_check=False, shape=torch.Size(self.shape), stride=stride
        )

    def _size(self, box: list[slice]) -> list[int]:
        return [part.stop - part.start for part in box]

    def _whole(self, term: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.name} {term}".encode()))
        return torch.randn(self.shape, generator=generator, dtype=torch.float32).to(self.dtype)

    def fault(self, output: torch.Tensor, pairwise: bool) -> str | None:
        """What is wrong with the local tensor of an output, or None.

        Args:
            pairwise: sums of a narrow dtype may be rounded after each term, as stock's are; else they are rounded once.
        """
        if list(output.shape) != list(self.exact.shape) or output.dtype != self.dtype:
            return f"has {output.dtype} {tuple(output.shape)}, not {self.dtype} {tuple(self.exact.shape)}"
        if self.magnitude is None:
            if torch.equal(output, self.exact):
                return None
            return f"{int((output != self.exact).sum())} of {output.numel()} elements differ"
        once = torch.finfo(self.dtype).eps / 2
        wide = min(once, torch.finfo(torch.float32).eps / 2)
        if pairwise:
            allowed = self.magnitude * (once * (self.terms - 1))
        elif once == wide:
            allowed = self.magnitude * (wide * (self.terms - 1))
        else:
            allowed = self.exact.abs() * once + self.magnitude * (wide * self.terms)
        wrong = ~((output.double() - self.exact).abs() <= allowed)
        return f"{int(wrong.sum())} of {output.numel()} sums are off" if wrong.any() else None


def digest(tensor: torch.Tensor) -> str:
    """A hash of the bytes, to compare replicas without sending them."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(flat.numpy().data, digest_size=16).hexdigest()


def faults_of(by_rank: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    """What is wrong with each contender's outputs, from the results of each rank: "faults" and "digests" by contender,
    and the "box" that it holds."""
    faults: dict[str, list[str]] = {}
    for rank, one in enumerate(by_rank):
        for contender, fault in one["faults"].items():
            faults.setdefault(contender, []).append(f"rank {rank}: {fault}")
    for contender in by_rank[0]["digests"]:
        by_box: dict[str, set[str]] = {}
        for one in by_rank:
            by_box.setdefault(one["box"], set()).add(one["digests"][contender])
        if any(len(digests) > 1 for digests in by_box.values()):
            faults.setdefault(contender, []).append("replicas differ")
    return faults
