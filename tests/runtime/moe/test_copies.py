"""What CPU ranks write to move and sum tokens: the loops over rows, and rows written by torch besides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from moe_reference import tokens_of
from rank_processes import run_ranks
from sync_guard import seen_inside
from torch.utils._python_dispatch import TorchDispatchMode

from shardweave.kernels.tokens.compiled_loops import Loop
from shardweave.runtime.moe.dispatcher import TokenDispatcher
from shardweave.runtime.moe.options import DispatchOptions

T, H, K, E, RANKS = 300, 768, 3, 8, 2
WRITTEN_BY_INDEX = {"index_copy_": 2, "index_add_": 2, "index_fill_": 2}  # the argument with the indices
OF_ROWS = {"pushes", "sums", "weighs"}
UNWRITTEN = {"empty", "new_empty", "empty_like", "empty_strided"}


class RowsWritten(TorchDispatchMode):
    """Counts rows of H elements written by operators, and notes the loops that were run, since the last `take`."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.loops = 0, []

    def take(self) -> tuple[int, list[str]]:
        taken, (self.rows, self.loops) = (self.rows, self.loops), (0, [])
        return taken

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, schema = kwargs or {}, function._schema
        name, collected = schema.name.split("::")[1], function(*args, **kwargs)
        given = {a.name: v for a, v in zip(schema.arguments, args, strict=False)} | kwargs
        written = [given.get(a.name) for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        if name not in UNWRITTEN:
            outs = collected if isinstance(collected, tuple | list) else [collected]
            written += [x for r, x in zip(schema.returns, outs, strict=False) if r.alias_info is None]
        for x in written:
            if isinstance(x, torch.Tensor) and x.dim() == 2 and x.shape[1] == H:
                at = WRITTEN_BY_INDEX.get(name)
                self.rows += len(x) if at is None else args[at].numel()
        return collected


def note_loops(mode: RowsWritten) -> None:
    """Note the loops over rows for the rest of this process."""
    call = Loop.__call__

    def noted(self: Loop, *args: int) -> None:
        if self.name in OF_ROWS:
            mode.loops.append(self.name)
        call(self, *args)

    Loop.__call__ = noted  # type: ignore[method-assign]


def counted(rank: int) -> list[dict[str, Any]]:
    t = tokens_of(rank, T, K, E, H, torch.float32, "holes")
    x, weights = t.x.clone().requires_grad_(), t.weights.clone().requires_grad_()
    collected, mode = [], RowsWritten()
    note_loops(mode)
    for save in ("buffer", "copy"):
        d = TokenDispatcher(
            num_experts=E,
            top_k=K,
            hidden=H,
            max_tokens=T,
            dtype=torch.float32,
            options=DispatchOptions(align=8, save=save),
        )
        mode.take()
        with seen_inside(), mode:
            routed = d.dispatch(x, t.ids, weights)
            rows: dict[str, Any] = {"received": int(routed.num_rows), "dispatch": mode.take()}
            rows["padding"] = rows["received"] - int(routed.counts.sum())
            y = d.combine(routed.x, routed)
            rows["combine"] = mode.take()
            torch.autograd.grad(y, (x, weights), t.gradient)
            rows["backward"] = mode.take()
            if save == "buffer":
                # In memory that peers cannot address, with strided rows.
                elsewhere = torch.full((len(routed.x), 2 * H), float("nan"))[:, :H]
                elsewhere[: rows["received"]] = routed.x.detach()[: rows["received"]]
                mode.take()
                again = d.combine(elsewhere, routed)
                rows["combine elsewhere"] = mode.take()
                assert torch.equal(again, y)
        collected.append(rows)
    return collected


@pytest.mark.multi
def test_rows_are_written_once():
    for kept, copied in run_ranks(counted, RANKS):
        received = kept["received"]
        # Rows are pushed where they stay; only padding rows are written besides.
        assert kept["dispatch"] == (kept["padding"], ["pushes"])
        assert kept["combine"] == (0, ["sums"])
        # Only received rows of the worst-case buffer are copied; peers cannot address the copy.
        assert kept["combine elsewhere"] == (received, ["sums"])
        # Gradients are pushed and weighed, then fetched and summed.
        assert kept["backward"] == (kept["padding"], ["pushes", "weighs", "sums"])
        assert copied["dispatch"] == (kept["padding"] + received, ["pushes"])
        assert copied["combine"] == (received, ["sums"])
