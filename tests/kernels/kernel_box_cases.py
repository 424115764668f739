"""Random boxes over random buffers, and what is the same between two results."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from shardweave.kernels import StridedBoxes, target_views


@dataclass
class Case:
    boxes: StridedBoxes
    source_sizes: list[int]  # elements
    target_sizes: list[int]


def strides_for(rng: np.random.Generator, extent: list[int], order: list[int], pad: int) -> tuple[list[int], int]:
    """Strides with order[0] innermost, some axes padded; and the elements spanned."""
    strides, step = [0] * len(extent), 1
    for axis in order:
        strides[axis] = step
        step *= max(extent[axis], 1)
        if pad and rng.random() < 0.3:
            step += pad * int(rng.integers(1, 4))
    return strides, step


def random_case(
    rng: np.random.Generator,
    axes: int,
    contributors: int = 1,
    count: int = 6,
    buffers: int = 2,
    unit: int = 1,
    kind: str = "any",
    fill: float | None = None,
    most: int = 7,
) -> Case:
    """`count` boxes with disjoint targets. Offsets, pads and the innermost extent are multiples of `unit`.

    kind: "straight" (same innermost axis), "transposed" (other innermost axis), "strided" (none adjacent), "any".
    """
    source_sizes, target_sizes = [0] * buffers, [0] * buffers
    rows: dict[str, list] = {name: [] for name in ("s", "t", "so", "to", "e", "ss", "ts")}
    for _ in range(count):
        extent = [int(x) for x in rng.integers(1, most + 1, axes)]
        if axes and kind == "any" and rng.random() < 0.1:
            extent[int(rng.integers(axes))] = 0
        order = [int(x) for x in rng.permutation(axes)]
        if axes:
            extent[order[0]] *= unit
        is_fill = fill is not None and rng.random() < 0.4
        target, source, target_offset, source_offset, source_stride = int(rng.integers(buffers)), [], 0, [], []
        target_stride, span = strides_for(rng, extent, order, unit)
        if kind == "strided" and axes:
            target_stride, span = [2 * x for x in target_stride], 2 * span
        target_offset = target_sizes[target] + unit * int(rng.integers(0, 3))
        target_sizes[target] = target_offset + -(-span // unit) * unit
        for _ in range(contributors):
            from_order = list(order)
            if kind == "any":
                from_order = [int(x) for x in rng.permutation(axes)]
            elif kind == "transposed" and axes > 1:
                from_order = order[::-1]
            stride, span = strides_for(rng, extent, from_order, unit)
            i = int(rng.integers(buffers))
            at = source_sizes[i] + unit * int(rng.integers(0, 3))
            source_sizes[i] = at + -(-span // unit) * unit
            source.append(-1 if is_fill else i)
            source_offset.append(at)
            source_stride.append(stride)
        for name, value in zip(
            rows, (source, target, source_offset, target_offset, extent, source_stride, target_stride), strict=True
        ):
            rows[name].append(value)
    n = count
    boxes = StridedBoxes(
        np.array(rows["s"], np.int64).reshape(n, contributors),
        np.array(rows["t"], np.int64),
        np.array(rows["so"], np.int64).reshape(n, contributors),
        np.array(rows["to"], np.int64),
        np.array(rows["e"], np.int64).reshape(n, axes),
        np.array(rows["ss"], np.int64).reshape(n, contributors, axes),
        np.array(rows["ts"], np.int64).reshape(n, axes),
        fill=0 if fill is None else fill,
    )
    return Case(boxes, [size + 3 for size in source_sizes], [size + 3 for size in target_sizes])


def random_bytes(rng: np.random.Generator, size: int, dtype: torch.dtype, skip: int = 0) -> torch.Tensor:
    """Any bit patterns, NaN among them; `skip`: elements that lie in the storage before the tensor."""
    raw = rng.integers(0, 2 if dtype is torch.bool else 256, (size + skip) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype)[skip:]


def random_values(rng: np.random.Generator, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of all magnitudes that the dtype reduces without only overflowing, with some specials."""
    if dtype is torch.bool:
        return torch.from_numpy(rng.integers(0, 2, size).astype(bool))
    if not dtype.is_floating_point and not dtype.is_complex:
        return random_bytes(rng, size, dtype)
    if dtype.is_complex:
        return torch.view_as_complex(random_values(rng, 2 * size, dtype.to_real()).reshape(size, 2))
    numbers = rng.standard_normal(size) * 10.0 ** rng.integers(-3, 3, size)
    special = rng.random(size)
    numbers[special < 0.02] = np.nan
    numbers[(special > 0.02) & (special < 0.03)] = np.inf
    numbers[(special > 0.03) & (special < 0.05)] *= 1e-5
    return torch.from_numpy(numbers).to(torch.float32).to(dtype)


def raw(tensor: torch.Tensor) -> np.ndarray:
    """The bytes of a 1-D tensor, [elements, itemsize]."""
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().reshape(tensor.numel(), tensor.itemsize)


def assert_same(got: torch.Tensor, want: torch.Tensor, signed_zeros: bool = True) -> None:
    """1-D tensors equal bit by bit, but for the payload of NaN (and the sign of zero where asked)."""
    assert got.dtype is want.dtype and got.shape == want.shape
    if got.dtype.is_complex:
        got, want = torch.view_as_real(got).flatten(), torch.view_as_real(want).flatten()
    word = f"u{got.element_size()}"
    differs = np.flatnonzero(raw(got).view(word) != raw(want).view(word))
    if got.dtype.is_floating_point:
        a, b = (x.cpu()[torch.from_numpy(differs)].to(torch.float64).numpy() for x in (got, want))
        equal = np.isnan(a) & np.isnan(b)
        if not signed_zeros:
            equal |= (a == 0) & (b == 0)
        differs = differs[~equal]
    assert len(differs) == 0, (
        f"{len(differs)} differ, first at {differs[0]}: {got.cpu()[differs[:4]]} {want.cpu()[differs[:4]]}"
    )


def written(boxes: StridedBoxes, sizes: list[int]) -> list[np.ndarray]:
    """Per target, [elements] bool: what the boxes write."""
    masks = [torch.zeros(size, dtype=torch.bool) for size in sizes]
    for view in target_views(boxes.target_rows, masks):
        view.fill_(True)
    return [mask.numpy() for mask in masks]
