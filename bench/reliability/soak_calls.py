"""The random calls of `soak`: every rank draws the same ones, and compares some results with slices of the whole."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from ...runtime.dtensor.batch import redistribute_batch
from ...runtime.dtensor.redistribute import redistribute
from ...runtime.moe.dispatcher import TokenDispatcher
from ...runtime.transports.choose_transport import TransportName

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64)
SUMMED = (torch.float32, torch.float64, torch.int32, torch.int64)  # in which sums of the values here are exact
_EXTENTS = (1, 2, 3, 5, 8, 13, 24, 48)
_MOST = 64  # values of a tensor are below this
_KINDS = ("now",) * 6 + ("begin", "begin", "use", "batch", "backward")
_REPEATED, _FRESH = 150, 0.01  # requests that repeat; the share of calls with another one
_BATCHES = 10.0  # batches are drawn anew with numbers of this mean, so that most calls repeat one
_BACKWARD = 0.1  # the share of dispatches that have one
_OFTEN = 3.0  # the transports come with shares of e⁻³: all but a twentieth of the calls have the first one

# Inputs are copies of parts of these, since drawing them would take longer than a call.
_DRAWN = torch.randint(_MOST, (_EXTENTS[-1] ** 3 + _MOST,), generator=torch.Generator().manual_seed(0))
_VALUES = {dtype: _DRAWN.to(dtype) for dtype in DTYPES}


class WrongValues(AssertionError):
    """A result is not that of the request."""


class Request(NamedTuple):
    """A redistribution of a tensor whose values follow from its number.

    Attributes:
        source: of the tensor, with its mesh, shape and dtype.
    """

    source: DTensorSpec
    target: tuple[Placement, ...]
    transport: TransportName
    base: int


def _often_first(random: Random, transports: Sequence[TransportName]) -> TransportName:
    return transports[min(int(random.expovariate(_OFTEN)), len(transports) - 1)]


def held(x: torch.Tensor, placements: Sequence[Placement], mesh: DeviceMesh) -> torch.Tensor:
    """What this rank holds of `x`: cut by torch.chunk, mesh dim after mesh dim; the whole, if values are partial."""
    at = mesh.get_coordinate()
    if at is None:
        return x.new_empty((0,) * max(x.dim(), 1))
    for dim, placement in enumerate(placements):
        if isinstance(placement, Shard):
            chunks = x.chunk(mesh.size(dim), placement.dim)
            x = chunks[at[dim]] if at[dim] < len(chunks) else x.narrow(placement.dim, 0, 0)
    return x


def whole_of(request: Request, seed: int) -> torch.Tensor:
    """The whole tensor: a view of values that all requests share."""
    assert request.source.tensor_meta is not None
    shape, _, dtype = request.source.tensor_meta
    first = (request.base + seed) % _MOST
    return _VALUES[dtype][first : first + shape.numel()].view(shape)


def wanted(request: Request, seed: int) -> torch.Tensor:
    """This rank's shard of the target."""
    terms, mesh = 1, request.source.device_mesh
    for dim, placement in enumerate(request.source.placements):
        terms *= mesh.size(dim) if isinstance(placement, Partial) else 1
    return held(whole_of(request, seed) * terms, request.target, mesh)


class Redistributions:
    """Random redistributions: of one tensor or a batch, at once or asynchronous, some with a backward.

    Args:
        transports: of which each request has one, the first ones more often.
    """

    def __init__(self, seed: int, transports: Sequence[TransportName]) -> None:
        self.rank, size = dist.get_rank(), dist.get_world_size()
        self._random, self._transports = Random(seed), transports
        groups: list[Any] = [list(range(size)), [0, 1], [0, size - 1], list(range(1, size))]
        self._meshes = [DeviceMesh("cpu", ranks, _init_backend=False) for ranks in groups]
        if size % 2 == 0:
            self._meshes.append(DeviceMesh("cpu", torch.arange(size).view(2, -1), _init_backend=False))
        self._requests = [self._drawn() for _ in range(_REPEATED)]
        self._begun: list[tuple[DTensor, Request, int]] = []
        self.verified = 0

    def _drawn(self) -> Request:
        random, mesh = self._random, self._random.choice(self._meshes)
        shape = torch.Size(random.choice(_EXTENTS) for _ in range(random.randint(1, 3)))
        dtype = random.choice(DTYPES)
        kinds: list[Placement] = [Replicate(), *map(Shard, range(len(shape)))]
        sources = [*kinds, Partial()] if dtype in SUMMED else kinds
        source = tuple(random.choice(sources) for _ in range(mesh.ndim))
        target = tuple(random.choice(kinds) for _ in range(mesh.ndim))
        meta = TensorMeta(shape, torch.empty(shape, device="meta").stride(), dtype)
        spec = DTensorSpec(mesh, source, tensor_meta=meta)
        return Request(spec, target, _often_first(random, self._transports), random.randrange(_MOST))

    def run(self, verify: bool) -> None:
        """Make the next call; with `verify`, compare its result."""
        random = self._random
        request = self._drawn() if random.random() < _FRESH else random.choice(self._requests)
        kind, seed = random.choice(_KINDS), random.randrange(_MOST)
        if kind == "batch":
            again = Random(int(random.expovariate(1 / _BATCHES)))
            requests = again.choices(self._requests, k=again.randint(1, 4))
            request = requests[0]
            requests = [r._replace(transport=request.transport) for r in requests]
            with torch.no_grad():
                ys = redistribute_batch(
                    [self._tensor(r, seed) for r in requests], [r.target for r in requests], transport=request.transport
                )
            self._check(verify, [(y, r, seed) for y, r in zip(ys, requests, strict=True)])
        elif kind == "backward" and self._has_backward(request):
            x = self._tensor(request, seed)
            x.requires_grad_()
            y = redistribute(x, request.target, transport=request.transport)
            ones = DTensor(torch.ones_like(y._local_tensor), y._spec, requires_grad=False)
            (gradient,) = torch.autograd.grad(y, x, ones)
            self._check(verify, [(y, request, seed)])
            assert isinstance(gradient, DTensor)
            if verify and not torch.equal(gradient.to_local(), torch.ones_like(gradient.to_local())):
                raise WrongValues(f"gradient of {request}")
        elif kind == "use":
            self._check(verify or len(self._begun) > 8, self._begun)
            self._begun.clear()
        else:
            with torch.no_grad():
                y = redistribute(
                    self._tensor(request, seed), request.target, transport=request.transport, async_op=kind == "begin"
                )
            if kind == "begin" and len(self._begun) < 16:
                self._begun.append((y, request, seed))  # else nobody ever waits for it
            elif kind == "now":
                self._check(verify, [(y, request, seed)])

    @staticmethod
    def _has_backward(request: Request) -> bool:
        meta, mesh = request.source.tensor_meta, request.source.device_mesh
        return meta is not None and meta.dtype == torch.float64 and mesh.get_coordinate() is not None

    @staticmethod
    def _tensor(request: Request, seed: int) -> DTensor:
        local = held(whole_of(request, seed), request.source.placements, request.source.device_mesh)
        return DTensor(local.clone(memory_format=torch.contiguous_format), request.source, requires_grad=False)

    def _check(self, verify: bool, results: Sequence[tuple[DTensor, Request, int]]) -> None:
        if not verify:
            return
        self.verified += 1
        for y, request, seed in results:
            if request.source.device_mesh.get_coordinate() is None:
                continue
            got, want = y.to_local() + 0, wanted(request, seed)
            if got.shape != want.shape or not torch.equal(got, want):
                raise WrongValues(f"rank {self.rank}: {request}: {got}, not {want}")


class Dispatches:
    """Random dispatches with their combines, some with a backward, of dispatchers with different settings."""

    def __init__(self, seed: int, transports: Sequence[TransportName]) -> None:
        self.rank, self._random, self.verified = dist.get_rank(), Random(f"{seed} dispatches"), 0
        self._own = torch.Generator().manual_seed(1000 * seed + self.rank)
        more: tuple[dict[str, Any], ...] = (
            {"num_experts": 8, "top_k": 2}, {"num_experts": 5, "top_k": 3, "align": 4},
            {"num_experts": 8, "top_k": 2, "save": "copy", "zero_rows": False},
            {"num_experts": 6, "top_k": 1, "capacity": 30, "overflow": "drop"},
        )  # fmt: skip
        common: dict[str, Any] = {"hidden": 16, "max_tokens": 12, "dtype": torch.float32}
        self._transports = transports
        self._dispatchers = {
            transport: [TokenDispatcher(**common, **settings, transport=transport) for settings in more]
            for transport in transports
        }

    def run(self, verify: bool) -> None:
        """Dispatch, scale each row by the number of its expert, and combine; with `verify`, compare the sums."""
        dispatcher = self._random.choice(self._dispatchers[_often_first(self._random, self._transports)])
        config, backward = dispatcher.config, self._random.random() < _BACKWARD
        tokens = int(torch.randint(0, config.max_tokens + 1, (), generator=self._own))
        x = torch.randn(tokens, config.hidden, generator=self._own).requires_grad_(backward)
        ids = torch.randint(-1, config.num_experts, (tokens, config.top_k), generator=self._own)
        weights = torch.rand(tokens, config.top_k, generator=self._own).requires_grad_(backward)
        routed = dispatcher.dispatch(x, ids, weights)
        low = config.bounds[dispatcher.transfers[0].me]
        scales = torch.zeros(len(routed.x), 1)
        groups = zip(routed.offsets.tolist(), routed.padded_counts.tolist(), strict=True)
        for expert, (end, padded) in enumerate(groups):
            scales[end - padded : end] = low + expert + 1
        rows = torch.arange(len(routed.x))[:, None] < routed.num_rows
        output = torch.where(rows, routed.x, 0) * scales
        sums = dispatcher.combine(output, routed)
        if backward:
            sums.sum().backward()
        if not verify:
            return
        self.verified += 1
        if config.overflow == "drop" and int(routed.dropped.sum()):
            return  # which rows are dropped depends on all ranks' ids
        factors = torch.where(ids < 0, 0, (ids + 1) * weights.detach()).sum(1, keepdim=True)
        for got, want in ((sums.detach(), factors * x.detach()), (x.grad, factors.expand(x.shape))):
            if got is not None and not torch.allclose(got, want, rtol=1e-4, atol=1e-4):
                raise WrongValues(f"rank {self.rank}: {dispatcher.explain()}: {got}, not {want}")
