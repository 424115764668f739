"""How many rows CPU ranks write to move and sum tokens, counted where operators are dispatched; nothing is timed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from moe_reference import tokens_of
from rank_processes import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from shardweave.runtime.moe.dispatcher import TokenDispatcher

T, H, K, E, RANKS = 300, 768, 3, 8, 2
WRITTEN_BY_INDEX = {"index_copy_": 2, "index_add_": 2, "index_fill_": 2}  # the argument that says which
UNWRITTEN = {"empty", "new_empty", "empty_like", "empty_strided"}


class RowsWritten(TorchDispatchMode):
    """Rows of H elements that operators have written since `take` was called last."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def take(self) -> int:
        rows, self.rows = self.rows, 0
        return rows

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, schema = kwargs or {}, function._schema
        name, found = schema.name.split("::")[1], function(*args, **kwargs)
        given = {a.name: v for a, v in zip(schema.arguments, args, strict=False)} | kwargs
        written = [given.get(a.name) for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        if name not in UNWRITTEN:
            outs = found if isinstance(found, tuple | list) else [found]
            written += [x for r, x in zip(schema.returns, outs, strict=False) if r.alias_info is None]
        for x in written:
            if isinstance(x, torch.Tensor) and x.dim() == 2 and x.shape[1] == H:
                at = WRITTEN_BY_INDEX.get(name)
                self.rows += len(x) if at is None else args[at].numel()
        return found


def counted(rank: int) -> list[dict[str, int]]:
    t = tokens_of(rank, T, K, E, H, torch.float32, "holes")
    x, weights = t.x.clone().requires_grad_(), t.weights.clone().requires_grad_()
    found = []
    for save in ("lease", "copy"):
        d = TokenDispatcher(num_experts=E, top_k=K, hidden=H, max_tokens=T, dtype=torch.float32, align=8, save=save)
        with RowsWritten() as mode:
            routed = d.dispatch(x, t.ids, weights)
            rows = {"entries": int((t.ids >= 0).sum()), "received": int(routed.num_rows), "dispatch": mode.take()}
            rows["padding"] = rows["received"] - int(routed.counts.sum())
            y = d.combine(routed.x, routed)
            rows["combine"] = mode.take()
            torch.autograd.grad(y, (x, weights), t.gradient)
            rows["backward"] = mode.take()
            if save == "lease":
                # Of memory that peers cannot address, and of rows that do not follow each other.
                elsewhere = torch.full((len(routed.x), 2 * H), float("nan"))[:, :H]
                elsewhere[: rows["received"]] = routed.x.detach()[: rows["received"]]
                mode.take()
                again = d.combine(elsewhere, routed)
                rows["combine elsewhere"] = mode.take()
                assert torch.equal(again, y)
        found.append(rows)
    return found


@pytest.mark.multi
def test_rows_are_written_once_on_their_way():
    for lease, copied in run_ranks(counted, RANKS):
        n, received, summed = lease["entries"], lease["received"], 3 * lease["entries"] + 2 * T
        assert lease["dispatch"] == n + lease["padding"]
        # In memory that stays in the cache each is fetched, weighted and added; then the results.
        assert n < lease["combine"] <= summed
        assert lease["combine elsewhere"] == lease["combine"] + received
        # Pushed, multiplied twice, for weights and for x, and fetched and summed again.
        assert lease["backward"] <= n + lease["padding"] + 2 * received + summed
        # Of a buffer for the worst case only what came is copied; the copy is nothing that peers can address.
        assert copied["dispatch"] == lease["dispatch"] + received
        assert copied["combine"] == lease["combine"] + received
