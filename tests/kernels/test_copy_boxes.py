from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from kernel_box_cases import Case, random_bytes, random_case, raw
from variants import crossed

from shardweave.errors import ArgumentError
from shardweave.kernels import (
    LaunchConfig,
    StridedBoxes,
    copy_boxes,
    copy_boxes_cpu,
    copy_launches,
    copy_table,
    source_views,
    target_views,
)

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
]
KINDS = ["any", "straight", "transposed", "strided"]
SMALL = LaunchConfig(tile_bytes=64, accesses_per_thread=1, num_warps=1)  # many tiles from small boxes


def one_box(extent, source_stride, target_stride, fill=0, source=0, source_offset=0, target_offset=0) -> StridedBoxes:
    return StridedBoxes(
        np.array([[source]]),
        np.array([0]),
        np.array([[source_offset]]),
        np.array([target_offset]),
        np.array([extent], np.int64).reshape(1, -1),
        np.array([[source_stride]], np.int64).reshape(1, 1, -1),
        np.array([target_stride], np.int64).reshape(1, -1),
        fill,
    )


def enumerate_copy(boxes: StridedBoxes, sources: list[np.ndarray], targets: list[np.ndarray], fill: np.ndarray) -> None:
    """Element by element over [elements, itemsize] bytes."""
    for i in range(len(boxes)):
        for index in itertools.product(*map(range, boxes.extent[i])):
            at = boxes.target_offset[i] + np.dot(boxes.target_stride[i], index)
            element = fill
            if boxes.source[i, 0] >= 0:
                element = sources[boxes.source[i, 0]][
                    int(boxes.source_offset[i, 0] + np.dot(boxes.source_stride[i, 0], index))
                ]
            targets[boxes.target[i]][int(at)] = element


def check_copy(
    rng, case: Case, dtype: torch.dtype, device: str, config: LaunchConfig | None = SMALL, skip=(0, 0)
) -> None:
    """Compare with the enumeration on targets of random bytes; elements outside the boxes must not change."""
    sources = [random_bytes(rng, size, dtype, skip[0]).to(device)[:] for size in case.source_sizes]
    targets = [random_bytes(rng, size, dtype, skip[1]).to(device)[:] for size in case.target_sizes]
    if device != "cpu" and any(skip):  # a transfer makes a fresh, aligned tensor
        sources = [torch.cat([t.new_empty(skip[0]), t])[skip[0] :] for t in sources]
        targets = [torch.cat([t.new_empty(skip[1]), t])[skip[1] :] for t in targets]
    want = [raw(t).copy() for t in targets]
    element = raw(torch.tensor([case.boxes.fill]).to(dtype))[0]
    enumerate_copy(case.boxes, [raw(s) for s in sources], want, element)
    table = copy_table(case.boxes, dtype, device, config)
    copy_boxes(table, sources, targets)
    for got, expected in zip(targets, want, strict=True):
        np.testing.assert_array_equal(raw(got), expected)


@pytest.mark.parametrize("axes", range(5))
def test_copy_boxes_cpu_equals_enumeration(axes):
    rng = np.random.default_rng(axes)
    for dtype in DTYPES:
        case = random_case(rng, axes, fill=1)
        sources = [random_bytes(rng, size, dtype, 1) for size in case.source_sizes]
        targets = [random_bytes(rng, size, dtype, 2) for size in case.target_sizes]
        want = [raw(t).copy() for t in targets]
        enumerate_copy(case.boxes, [raw(s) for s in sources], want, raw(torch.tensor([1]).to(dtype))[0])
        copy_boxes_cpu(case.boxes, sources, targets)
        for got, expected in zip(targets, want, strict=True):
            np.testing.assert_array_equal(raw(got), expected)


@pytest.mark.plan
@pytest.mark.parametrize("kind", ["any", "straight", "transposed", "strided"])
@pytest.mark.parametrize(("itemsize", "unit"), [(1, 1), (2, 8), (4, 1), (4, 2), (8, 4), (16, 1)])
@pytest.mark.parametrize("align", [(16, 16), (2, 8), (1, 1)])
def test_descriptors_cover_every_byte_once(kind, itemsize, unit, align):
    rng = np.random.default_rng([itemsize, unit, *align])
    for axes in range(5):
        case = random_case(rng, axes, unit=unit, kind=kind, fill=0, count=4, most=5)
        want = sorted(_moves_of_boxes(case.boxes, itemsize))
        got = []
        for launch in copy_launches(case.boxes, itemsize, *align, config=SMALL):
            got += _moves_of_launch(launch)
            word, d = launch.source_word, launch.descriptors
            columns = d[:, 6] if launch.kind == "transposed" else d[:, 7]
            for vector, offset, stride, bound in (
                (launch.source_vector, d[:, 2], d[:, 4], d[:, 7]),
                (launch.target_vector, d[:, 3], d[:, 5], columns),
            ):
                assert word * vector <= 16
                assert not (offset % vector).any() and not (stride % vector).any() and not (bound % vector).any()
            assert word * launch.source_vector <= align[0] and word * launch.target_vector <= align[1]
        assert sorted(got) == want


def _moves_of_boxes(boxes: StridedBoxes, itemsize: int):
    for i in range(len(boxes)):
        for index in itertools.product(*map(range, boxes.extent[i])):
            for byte in range(itemsize):
                source = boxes.source_offset[i, 0] + np.dot(boxes.source_stride[i, 0], index)
                at = boxes.target_offset[i] + np.dot(boxes.target_stride[i], index)
                from_byte = -1 if boxes.source[i, 0] < 0 else int(source) * itemsize + byte
                yield int(boxes.target[i]), int(at) * itemsize + byte, int(boxes.source[i, 0]), from_byte


def _moves_of_launch(launch):
    word = launch.source_word
    for source, target, so, to, ss, ts, rows, cols in launch.descriptors.tolist():
        assert rows <= launch.rows and cols <= launch.columns
        for r, c, byte in itertools.product(range(rows), range(cols), range(word)):
            at = to + (c * ts + r if launch.kind == "transposed" else r * ts + c)
            from_byte = -1 if source < 0 else (so + r * ss + c) * word + byte
            yield target, at * word + byte, source, from_byte


@pytest.mark.plan
def test_aligned_boxes_are_one_launch_of_16_byte_accesses():
    boxes = one_box([64, 2, 128], [512, 256, 1], [256, 128, 1])
    (launch,) = copy_launches(boxes, 2)
    assert (launch.kind, launch.source_word, launch.source_vector, launch.target_vector) == ("straight", 8, 2, 2)
    (launch,) = copy_launches(one_box([64, 128], [1, 64], [128, 1]), 2)
    assert (launch.kind, launch.source_word, launch.source_vector, launch.target_vector) == ("transposed", 2, 8, 8)
    (launch,) = copy_launches(one_box([7, 11], [11, 1], [13, 1]), 4)
    assert (launch.kind, launch.source_word, launch.source_vector) == ("straight", 4, 1)
    (launch,) = copy_launches(one_box([64, 64], [128, 2], [64, 1]), 4)
    assert (launch.kind, launch.columns) == ("strided", 1)


@pytest.mark.plan
def test_contiguous_axes_are_one_row():
    (launch,) = copy_launches(one_box([4, 5, 6, 8], [240, 48, 8, 1], [240, 48, 8, 1]), 4, config=LaunchConfig())
    assert launch.descriptors.tolist() == [[0, 0, 0, 0, 0, 0, 1, 480]]


@pytest.mark.plan
@pytest.mark.parametrize("columns", [4096, 4097, 8193, 300, 40])
@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_tiles_take_runs_of_a_row_and_leave_little_of_it(columns, itemsize):
    rows = 4095
    (launch,) = copy_launches(one_box([rows, columns], [columns, 1], [columns + 1, 1]), itemsize)
    assert launch.columns * launch.source_word >= min(512, columns * itemsize)
    moved, slots = (
        rows * columns * itemsize,
        len(launch.descriptors) * launch.rows * launch.columns * launch.source_word,
    )
    assert slots <= 2 * moved if columns < 512 else slots < 1.13 * moved, launch


@pytest.mark.plan
def test_unaligned_box_does_not_narrow_large_boxes():
    n = 1 << 20
    boxes = StridedBoxes([[0], [0]], [0, 0], [[0], [n]], [0, n], [[n], [3]], [[[1]], [[1]]], [[1], [1]])
    wide, narrow = copy_launches(boxes, 4)
    assert (wide.source_word, wide.source_vector, narrow.source_word) == (8, 2, 4)


@pytest.mark.plan
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"extent": [[2, 2]]}, "source_stride has shape"),
        ({"source": [[0, -1]], "source_offset": [[0, 0]], "source_stride": [[[1], [1]]]}, "fill row"),
        ({"source": [[-2]]}, "ids must be"),
        ({"target_offset": [-1]}, "target_offset has negative"),
        ({"target_stride": [[0]]}, "target_stride is 0"),
        ({"extent": [[2.5]]}, "int64 is needed"),
        ({"source": [0]}, r"\[n, contributors\]"),
    ],
)
def test_mismatched_boxes_are_refused(change, text):
    fields = {
        "source": [[0]],
        "target": [0],
        "source_offset": [[0]],
        "target_offset": [0],
        "extent": [[2]],
        "source_stride": [[[1]]],
        "target_stride": [[1]],
    }
    with pytest.raises(ArgumentError, match=text):
        StridedBoxes(**{**fields, **change})


def test_wrong_buffers_and_fills_are_refused():
    box = one_box([2], [1], [1])
    with pytest.raises(ArgumentError, match="does not cast"):
        copy_boxes(copy_table(box, 4), [torch.zeros(2)], [torch.zeros(2, dtype=torch.int32)])
    with pytest.raises(ArgumentError, match="itemsize is 3"):
        copy_table(box, 3)
    fill = one_box([2], [0], [1], fill=7, source=-1)
    with pytest.raises(ArgumentError, match="a dtype is needed"):
        copy_table(fill, 4)
    with pytest.raises(ArgumentError, match="cannot represent"):
        copy_table(one_box([2], [0], [1], fill=float("inf"), source=-1), torch.int8)


def test_views_alias_buffers():
    base = torch.arange(40.0)
    box = one_box([2, 3], [10, 1], [3, 1], source_offset=2)
    ((view,),) = source_views(box.source_rows, [base[5:]])
    assert view.tolist() == [[7.0, 8.0, 9.0], [17.0, 18.0, 19.0]]
    out = torch.zeros(6)
    (part,) = target_views(box.target_rows, [out])
    part.copy_(view)
    assert out.tolist() == [7.0, 8.0, 9.0, 17.0, 18.0, 19.0]
    assert source_views(one_box([2], [0], [1], source=-1).source_rows, []) == [[]]
    assert target_views(one_box([0], [1], [1], target_offset=99).target_rows, [out])[0].shape == (0,)


def one_of_its_size(kind: str, dtype: torch.dtype) -> bool:
    """Whether this dtype stands for those of its size with boxes of this kind."""
    alike = [other for other in DTYPES if other.itemsize == dtype.itemsize]
    return KINDS.index(kind) % len(alike) == alike.index(dtype)


@crossed("kind, dtype", KINDS, DTYPES, ids=str, gate=one_of_its_size)
def test_copy_boxes_equals_enumeration(device, dtype, kind):
    rng = np.random.default_rng([dtype.itemsize, len(kind)])
    for axes in range(5):
        fill = None if axes == 1 else 0 if dtype.is_complex else 1
        check_copy(rng, random_case(rng, axes, count=3, kind=kind, fill=fill, most=5), dtype, device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.complex64], ids=str)
@pytest.mark.parametrize("kind", ["straight", "transposed"])
def test_kernel_copies_aligned_boxes_in_default_tiles(device, dtype, kind):
    rng = np.random.default_rng(5)
    check_copy(rng, random_case(rng, 2, unit=8, kind=kind, count=4, most=16), dtype, device, config=None)


@pytest.mark.parametrize("buffers", [1, 3, 4, 5, 9])
def test_copy_boxes_reads_addresses_from_table(device, buffers):
    rng = np.random.default_rng(buffers)
    check_copy(rng, random_case(rng, 2, buffers=buffers, count=12, fill=1, most=4), torch.int16, device)


@pytest.mark.parametrize("skip", [(1, 0), (0, 1), (2, 4)])
def test_kernel_narrows_its_words_for_unaligned_buffers(device, skip):
    rng = np.random.default_rng(6)
    case = random_case(rng, 2, unit=8, kind="straight", count=3)
    check_copy(rng, case, torch.bfloat16, device, skip=skip)


def test_kernel_copies_bytes_from_and_to_odd_addresses(device):
    base = torch.arange(64, dtype=torch.uint8, device=device)
    source = base[1:41]
    out = torch.zeros(43, dtype=torch.uint8, device=device)
    copy_boxes(copy_table(one_box([5, 8], [8, 1], [8, 1]), 1, device), [source], [out[3:]])
    assert out.tolist() == [0] * 3 + list(range(1, 41))


def test_copy_boxes_fills_inf_and_true(device):
    out = torch.full((3, 5), 7.0, device=device)
    table = copy_table(
        one_box([2, 3], [0, 0], [5, 1], fill=float("-inf"), source=-1, target_offset=6), torch.float32, device
    )
    copy_boxes(table, [], [out])
    want = torch.full((3, 5), 7.0)
    want[1:, 1:4] = float("-inf")
    assert torch.equal(out.cpu(), want)


def test_copy_boxes_with_changing_addresses(device):
    boxes = StridedBoxes([[0], [1]], [1, 0], [[0], [0]], [0, 0], [[4], [4]], [[[1]], [[1]]], [[1], [1]])
    table = copy_table(boxes, torch.float32, device)
    for value in range(20):
        sources = [torch.full((4,), float(value + i), device=device) for i in range(2)]
        targets = [torch.full((4,), float("nan"), device=device) for _ in range(2)]
        copy_boxes(table, sources, targets)
        assert targets[1].tolist() == [value] * 4 and targets[0].tolist() == [value + 1] * 4


def test_copy_boxes_refuses_wrong_buffers(device):
    table = copy_table(one_box([2], [1], [1]), torch.float32, device)
    x = torch.zeros(2, device=device)
    with pytest.raises(ArgumentError, match=r"targets\[0\] has dtype"):
        copy_boxes(table, [x], [x.int()])
    with pytest.raises(ArgumentError, match="sources: 0 buffers"):
        copy_boxes(table, [], [x])


def test_copy_boxes_of_no_boxes_launches_nothing(device):
    for extent in ([0], [3, 0]):
        table = copy_table(one_box(extent, [1] * len(extent), [1] * len(extent)), torch.float32, device)
        assert table.variant(16, 16) == []
        copy_boxes(table, [torch.zeros(0, device=device)], [torch.zeros(0, device=device)])


def test_tile_size_by_bytes_and_processors():
    """About two programs per SM, of 4 to 16 KiB; a reduction's contributors fit in registers."""
    for nbytes, processors, tile in ((1 << 12, 132, 4096), (1 << 21, 132, 8192), (1 << 21, 108, 16384),
                                     (1 << 21, 304, 4096), (1 << 22, 304, 8192), (1 << 30, 132, 16384)):  # fmt: skip
        assert LaunchConfig.for_copy(nbytes, processors).tile_bytes == tile
        assert LaunchConfig.for_reduction(nbytes, 1, 2, processors).tile_bytes == tile
    boxes = one_box([1 << 10, 1 << 10], [1 << 11, 1], [1 << 11, 1])
    few, many = (sum(len(x.descriptors) for x in copy_launches(boxes, 2, processors=n)) for n in (108, 304))
    assert few == 128 and many == 512
