"""A model as an automatic sharding solver places it: DTensors on the whole mesh, and `redistribute` between them.

Layers of Llama-3-8B's sizes and experts of DeepSeek-V3's. Every weight is cut by both mesh dims and gathered over the
first where it is used, its gradient reduced to where it came from; sequences are cut by both, or by one and heads by
the other. Orders are the canonical one, and that of FSDP2, in which the second mesh dim cuts first. Where placements
disagree with what an op wants, DTensor redistributes by itself, and that is recorded too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed.tensor as dt
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

R, S0, S1, S2, P = Replicate(), Shard(0), Shard(1), Shard(2), Partial()


@dataclass(frozen=True)
class SolverSizes:
    sequence: int = 8192
    width: int = 4096
    heads: int = 32
    kv_heads: int = 8
    hidden: int = 14336
    square: int = 8192
    experts: int = 256
    expert_width: int = 7168
    expert_hidden: int = 2048
    rows: int = 32  # of each expert
    tokens: int = 16384
    vocabulary: int = 128257
    batch: int = 7


def run(mesh: DeviceMesh, sizes: SolverSizes) -> None:
    """One step of everything, on a mesh of two dims; a collective."""
    megatron_layer(mesh, sizes)
    ulysses_layer(mesh, sizes)
    orders(mesh, sizes)
    experts(mesh, sizes)
    uneven(mesh, sizes)


def fsdp_order(mesh: DeviceMesh) -> tuple[Placement, Placement]:
    """Rows cut by the second mesh dim first, as torch's public placements spell it."""
    return _StridedShard(0, split_factor=mesh.size(1)), S0


def made(mesh: DeviceMesh, size: tuple[int, ...], dtype: torch.dtype, *placements: Placement) -> DTensor:
    tensor = dt.empty(size, dtype=dtype, device_mesh=mesh, placements=placements)
    tensor.requires_grad_()
    return tensor


def gathered(weight: DTensor, *placements: Placement) -> DTensor:
    """A weight for use in bfloat16; gradients are reduced in float32."""
    return weight.redistribute(placements=placements, forward_dtype=torch.bfloat16, backward_dtype=torch.float32)


def linear(x: DTensor, weight: DTensor) -> DTensor:
    return _dtensor(F.linear(x, weight))


def _dtensor(x: torch.Tensor) -> DTensor:
    assert isinstance(x, DTensor)
    return x


def megatron_layer(mesh: DeviceMesh, sizes: SolverSizes) -> None:
    """Columns and heads cut by the second mesh dim, the sequence by the first, and by both between."""
    head = sizes.width // sizes.heads
    activation = (1, sizes.sequence, sizes.width)
    by_rows = {"wq": sizes.width, "wk": sizes.kv_heads * head, "wv": sizes.kv_heads * head, "w3": sizes.hidden}
    w = {name: made(mesh, (rows, sizes.width), torch.float32, S0, S0) for name, rows in by_rows.items()}
    w["wo"] = made(mesh, (sizes.width, sizes.width), torch.float32, S0, S1)
    w["w1"] = made(mesh, (sizes.hidden, sizes.width), torch.float32, S0, S0)
    w["w2"] = made(mesh, (sizes.width, sizes.hidden), torch.float32, S0, S1)
    x = made(mesh, activation, torch.bfloat16, S1, S1)
    whole = x.redistribute(placements=(S1, R))
    q, k, v = (linear(whole, gathered(w[name], R, S0)) for name in ("wq", "wk", "wv"))
    # Each rank's queries meet the keys of the whole sequence.
    k, v = (t.redistribute(placements=(R, S2)) for t in (k, v))
    out = linear(_attention(q, k, v, head), gathered(w["wo"], R, S1))
    x = _dtensor(x + out.redistribute(placements=(S1, S1)))
    whole = x.redistribute(placements=(S1, R))
    hidden = F.silu(linear(whole, gathered(w["w1"], R, S0))) * linear(whole, gathered(w["w3"], R, S0))
    out = linear(_dtensor(hidden), gathered(w["w2"], R, S1)).redistribute(placements=(S1, R))
    (out.redistribute(placements=(S1, S1)) + x).float().square().sum().backward()


def ulysses_layer(mesh: DeviceMesh, sizes: SolverSizes) -> None:
    """The sequence cut by both mesh dims; inside attention, heads by the second."""
    weight = made(mesh, (sizes.width, sizes.width), torch.float32, S0, S0)
    x = made(mesh, (1, sizes.sequence, sizes.width), torch.bfloat16, S1, S1)
    q = _dtensor(linear(x, gathered(weight, R, R)).unflatten(-1, (sizes.heads, -1)))  # [1, T, heads, head]
    heads = q.redistribute(placements=(S1, S2))
    heads.redistribute(placements=(S1, S1)).flatten(2).float().square().sum().backward()


def _attention(q: DTensor, k: DTensor, v: DTensor, head: int) -> DTensor:
    """Of q [B, T, heads · head] on (S1, S2), k and v [B, T, kv_heads · head] on (R, S2); each rank for its own."""
    parts = []
    for x, of_keys in ((q, False), (k, True), (v, True)):
        local = x.to_local(grad_placements=(P, S2) if of_keys else (S1, S2))
        parts.append(local.unflatten(-1, (-1, head)).transpose(1, 2))
    mine, keys, values = parts
    out = F.scaled_dot_product_attention(mine, keys, values, enable_gqa=mine.shape[1] != keys.shape[1])
    out = out.transpose(1, 2).flatten(2)
    return DTensor.from_local(out, q.device_mesh, (S1, S2), run_check=False, shape=q.shape, stride=q.stride())


def orders(mesh: DeviceMesh, sizes: SolverSizes) -> None:
    """Weights that change the order in which mesh dims cut them, or the tensor dims."""
    size = (sizes.hidden, sizes.width)
    weight = made(mesh, size, torch.float32, R, S0)
    other = weight.redistribute(placements=fsdp_order(mesh))
    x = made(mesh, (sizes.sequence, sizes.width), torch.bfloat16, S0, R)
    linear(x, gathered(other, R, S0)).float().square().sum().backward()
    with torch.no_grad():
        canonical = weight.redistribute(placements=(S0, S0))
        canonical.redistribute(placements=fsdp_order(mesh))
        _dtensor(other.to(torch.bfloat16)).redistribute(placements=(S0, S0))
        square = made(mesh, (sizes.square, sizes.square), torch.float32, R, R)
        square.redistribute(placements=(S0, S1)).redistribute(placements=(S1, S0))


def experts(mesh: DeviceMesh, sizes: SolverSizes) -> None:
    """Experts cut by the second mesh dim, each expert's tokens by the first, weights in FSDP2's order; one expert for
    all tokens; tokens that change from rows to columns."""
    size = (sizes.experts, sizes.expert_width, sizes.expert_hidden)
    with torch.no_grad():
        placed = made(mesh, size, torch.bfloat16, R, S0).redistribute(placements=fsdp_order(mesh))
    weight = _dtensor(placed.detach().requires_grad_())
    rows = made(mesh, (sizes.experts, sizes.rows * mesh.size(0), sizes.expert_width), torch.bfloat16, S1, S0)
    torch.bmm(rows, weight.redistribute(placements=(R, S0))).float().square().sum().backward()
    shared = made(mesh, (sizes.expert_hidden, sizes.expert_width), torch.float32, S0, S0)
    tokens = made(mesh, (sizes.tokens, sizes.expert_width), torch.bfloat16, S0, R)
    linear(tokens, gathered(shared, R, S0)).float().square().sum().backward()
    with torch.no_grad():
        tokens.redistribute(placements=(S0, S0)).redistribute(placements=(S0, S1))


def uneven(mesh: DeviceMesh, sizes: SolverSizes) -> None:
    """Sizes that no mesh divides."""
    size = (sizes.vocabulary, sizes.width)
    weight = made(mesh, size, torch.bfloat16, S0, S0)
    x = made(mesh, (sizes.sequence, sizes.width), torch.bfloat16, S0, R)
    linear(x, weight.redistribute(placements=(R, S0))).float().square().sum().backward()
    with torch.no_grad():
        made(mesh, size, torch.bfloat16, S0, R).redistribute(placements=(S1, R))
        activation = (sizes.batch, sizes.sequence, sizes.width)
        made(mesh, activation, torch.bfloat16, S0, S1).redistribute(placements=(S1, S0))
        made(mesh, activation, torch.bfloat16, S0, S1).redistribute(placements=(R, S1))
