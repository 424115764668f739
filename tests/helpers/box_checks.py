"""Checks of the boxes of programs against the brute-force oracle."""

from __future__ import annotations

import math

import brute_force_oracle as oracle
import numpy as np

from shardweave.planner import FILL, Exchange, Program, TransferTable

BOX_COLUMNS = ("receiver", "sender", "source_start", "target_start", "extent", "source_step", "target_step")


def offsets(
    shape: tuple[int, ...], start: np.ndarray, extent: np.ndarray, step: np.ndarray, axes: tuple[int, ...]
) -> np.ndarray:
    """Flat offsets of a box in a contiguous local tensor, which must contain it."""
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    flat = np.array(int(sum(s * n for s, n in zip(start, strides, strict=True))))
    last = list(start)
    for n, by, dim in zip(extent, step, axes, strict=True):
        flat = flat[..., None] + np.arange(n) * by * strides[dim]
        last[dim] += (n - 1) * by
    assert all(0 <= a and b < n for a, b, n in zip(start, last, shape, strict=True))
    return flat.reshape(-1)


def assert_boxes_match_oracle(program: Program) -> None:
    """Check that every element of every target shard is written once, from where the oracle has it on the sender."""
    mesh_shape, shape = program.mesh.shape, program.shape
    places = oracle.coordinates(mesh_shape)
    for step in program.steps:
        held = oracle.held_indices(mesh_shape, shape, str(step.source))
        wanted = oracle.held_indices(mesh_shape, shape, str(step.target))
        covered = [np.zeros(indices.numel(), dtype=int) for indices in wanted]
        boxes, group = step.boxes, step.group if isinstance(step, Exchange) else ()
        a, b = oracle.read(str(step.source)), oracle.read(str(step.target))
        reduced = [m for m in a.partial_dims if a.tokens[m] != b.tokens[m]]
        contributors = list(oracle.coordinates(tuple(mesh_shape[m] for m in reduced)))
        assert boxes.sender.shape == (len(boxes), len(contributors))
        assert boxes.elements.all()
        for row in range(len(boxes)):
            receiver = int(boxes.receiver[row])
            to = offsets(
                tuple(wanted[receiver].shape),
                boxes.target_start[row],
                boxes.extent[row],
                boxes.target_step[row],
                boxes.axes,
            )
            covered[receiver][to] += 1
            indices = wanted[receiver].reshape(-1)[to]
            for contributor, sender in zip(contributors, boxes.sender[row].tolist(), strict=True):
                if sender == FILL:
                    assert b.partial_dims and (boxes.sender[row] == FILL).all()
                    continue
                assert tuple(places[sender][m] for m in reduced) == contributor, program.explain()
                outside = [
                    m for m in range(len(places[0])) if m not in group and places[sender][m] != places[receiver][m]
                ]
                assert not outside, program.explain()
                at = offsets(
                    tuple(held[sender].shape),
                    boxes.source_start[row],
                    boxes.extent[row],
                    boxes.source_step[row],
                    boxes.axes,
                )
                assert held[sender].reshape(-1)[at].equal(indices), program.explain()
        assert all((cover == 1).all() for cover in covered), program.explain()


def assert_matches_program_of_all(alone: Program, whole: Program) -> None:
    """Check that `alone`, the program of one rank, equals its part of `whole`, the program of all ranks."""
    (rank,) = alone.ranks
    assert alone.bytes_received == [whole.bytes_received[rank]]
    assert alone.bytes_bound == (whole.bytes_bound and [whole.bytes_bound[rank]])
    assert alone.peak_bytes == [whole.peak_bytes[rank]]
    assert alone.digest == whole.digest
    for mine, step in zip(alone.steps, whole.steps, strict=True):
        assert (mine.kind, mine.source, mine.target, mine.reduce, mine.fill) == (
            step.kind, step.source, step.target, step.reduce, step.fill
        )  # fmt: skip
        assert getattr(mine, "group", None) == getattr(step, "group", None)
        expected = rows_of_rank(step.boxes, rank)
        assert mine.boxes.axes == expected.axes
        for name in BOX_COLUMNS:
            assert np.array_equal(getattr(mine.boxes, name), getattr(expected, name)), (whole.explain(), rank)


def rows_of_rank(boxes: TransferTable, rank: int) -> TransferTable:
    """The rows in which a rank sends or receives."""
    return boxes.select((boxes.receiver == rank) | (boxes.sender == rank).any(axis=1))
