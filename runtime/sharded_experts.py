"""The experts of each rank where DTensor shards their parameters, which is not TokenDispatcher's own rule."""

from __future__ import annotations


def experts_of_shards(num_experts: int, ranks: int) -> list[list[int]] | None:
    """The `expert_map` of parameters that are `Shard(0)` over `ranks`; None where the dispatcher's rule is the same.

    DTensor shards by torch.chunk: ten experts on four ranks are 3, 3, 3 and 1, and the last ranks may have none.
    """
    if num_experts % ranks == 0:
        return None
    each = -(-num_experts // ranks)
    return [list(range(min(r * each, num_experts), min((r + 1) * each, num_experts))) for r in range(ranks)]
