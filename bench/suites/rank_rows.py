"""The rows of a case that ranks of this machine have measured together."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from ..baselines.stock_dtensor import faults_of
from ..harness.interleaved import slowest
from ..harness.measure import Sink


def result(seconds: dict[str, list[float]], **rest: Any) -> dict[str, Any]:
    """What a rank sends of a case.

    Args:
        seconds: rounds by contender; "copy" is the bare copy of the bytes that have to move.
        rest: "faults" and "digests" of outputs and the "box" that the rank holds, as `faults_of` takes them; "absent":
            contenders that were not measured, and why; "bytes": what the rank moves, by contender; "bound": the least;
            "detail".
    """
    empty: dict[str, Any] = {"faults": {}, "digests": {}, "box": "", "absent": {}, "bytes": {}, "bound": None}
    return {"seconds": seconds, **empty, "detail": {}, **rest}


def put(sink: Sink, by_rank: Sequence[dict[str, Any]], case: str, timed_if_wrong: Sequence[str] = ()) -> None:
    """Put the rows of a case into a sink. Bytes are those of the rank with most.

    Args:
        timed_if_wrong: contenders that have a row although their result is wrong, which a note says.
    """
    sink.begin(case)
    for contender, why in by_rank[0]["absent"].items():
        sink.absent(case, contender, why)
    seconds, faults = [rank["seconds"] for rank in by_rank], faults_of(by_rank)
    bound = None if by_rank[0]["bound"] is None else max(rank["bound"] for rank in by_rank)
    for contender in seconds[0]:
        wrong = "; ".join(faults.get(contender, ()))
        if wrong and contender not in timed_if_wrong:
            sink.fault(case, contender, wrong)
            continue
        samples, moved = slowest(seconds, contender), [rank["bytes"].get(contender) for rank in by_rank]
        copied = median(slowest(seconds, "copy")) if any(rank["bytes"].get("copy") for rank in by_rank) else None
        sink.row(
            case, contender, samples,
            bytes=None if moved[0] is None else max(moved),
            bound_bytes=bound,
            share_of_ceiling=None if copied is None else copied / median(samples),
            note=f"its result is wrong: {wrong}" if wrong else "",
            detail=by_rank[0]["detail"],
        )  # fmt: skip
