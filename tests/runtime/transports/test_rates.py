"""What the measurement of rates moves, and what it allocates."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pretended_gpus import PretendedGpus

from shardweave.runtime.transports.symmetric_memory import rates

pytestmark = pytest.mark.plan
CACHE = 1 << 12


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("nbytes", [1 << 10, 1 << 14, 100_000])
def test_equal_bytes_past_the_cache(size: int, nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    moved, uses, empty = list[tuple[Any, ...]](), list[str](), torch.empty
    with PretendedGpus(1) as gpus, gpus.device(torch.device("cuda", 1)):
        windows = {rank: torch.zeros(nbytes, dtype=torch.uint8, device="cuda") for rank in range(size)}
        allocated: list[int] = []

        def allocate(number: int, **options: Any) -> torch.Tensor:
            allocated.append(number)
            return empty(number, **options)

        def copy(boxes: Any, sources: Any, targets: Any) -> None:
            gpus.log.append(("copy", len(moved)))
            moved.append((boxes, sources, targets))

        monkeypatch.setattr(rates, "copy_table", lambda boxes, dtype, device: boxes)
        monkeypatch.setattr(rates, "copy_boxes", copy)
        monkeypatch.setattr(torch, "empty", allocate)
        monkeypatch.setattr(torch.Tensor, "zero_", lambda x: gpus.log.append(("zero", x.numel())) or x.fill_(0))
        transport: Any = SimpleNamespace(
            rank=1,
            window=lambda ranks, most, halves: SimpleNamespace(data=windows, nbytes=nbytes),
            signal=lambda window, use: uses.append(use),
            check=lambda: None,
            exchange_text=lambda key, ranks, text: dict.fromkeys(ranks, text),
        )
        found = rates.measure_rates(transport, tuple(range(size)), nbytes)
    assert uses == ["acquire", "barrier", "release"]
    peers = size - 1
    part = nbytes // size // 16 * 16
    assert allocated == [max(part * peers, 2 * CACHE)]  # nothing of the size of the windows of all ranks
    # In each trial the cache is overwritten before the events that time the copy.
    kinds = [kind for kind, _ in gpus.log if kind != "capturing"]
    assert kinds == ["zero", "event", "copy", "event"] * 18
    assert {number for kind, number in gpus.log if kind == "zero"} == {allocated[0]}
    assert found == rates.Rates(*[part * peers / 2e-3] * 3)
    for boxes, sources, targets in moved:
        assert boxes.extent.sum() == part * peers
        # Every byte is read once and written once, inside its buffer.
        for ids, offsets, buffers in (
            (boxes.source[:, 0], boxes.source_offset[:, 0], sources),
            (boxes.target, boxes.target_offset, targets),
        ):
            assert len(set(zip(ids.tolist(), offsets.tolist(), strict=True))) == peers
            assert all(o % part == 0 and o + part <= len(buffers[i]) for i, o in zip(ids, offsets, strict=True))
    pushes, pulls, local = moved[0], moved[6], moved[12]
    others = [windows[rank] for rank in range(size) if rank != 1]
    for rank, (ours, theirs) in enumerate([(pushes[2], others), (pulls[1], others)]):
        assert all(a is b for a, b in zip(ours, theirs, strict=True)), rank
    assert pushes[1][0] is local[1][0] is windows[1] and (pushes[0].target_offset == part).all()
