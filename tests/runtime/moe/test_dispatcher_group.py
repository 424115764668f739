"""Messages of a dispatcher belong to its own process group: on NCCL the default group would connect all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from dispatcher_settings import with_options
from moe_reference import tokens_of
from rank_processes import run_ranks

import shardweave
from shardweave.runtime.transports.comm_requests import Barrier
from shardweave.runtime.transports.process_group import ProcessGroupTransport

pytestmark = pytest.mark.multi
EXPERTS, K, HIDDEN, MOST = 6, 2, 16, 12


def groups_of_requests(rank: int, settings: dict[str, Any]) -> tuple[int, bool]:
    """The number of messages of a layer of ranks 0 and 2, and whether all are of the group of these ranks."""
    group = dist.new_group([0, 2])
    if rank == 1:
        return 0, True
    d = shardweave.TokenDispatcher(
        group,
        **with_options(
            num_experts=EXPERTS,
            top_k=K,
            hidden=HIDDEN,
            max_tokens=MOST,
            dtype=torch.float32,
            transport="process_group",
            **settings,
        ),
    )
    groups, begin = list[Any](), ProcessGroupTransport.begin

    def noted(self: Any, request: Any) -> Any:
        if not isinstance(request, Barrier) and hasattr(request, "group"):
            groups.append(request.group)
        return begin(self, request)

    ProcessGroupTransport.begin = noted  # type: ignore[method-assign]
    t = tokens_of(rank, MOST - rank, K, EXPERTS, HIDDEN, torch.float32, "uniform")
    x = t.x.requires_grad_()
    routed = d.dispatch(x, t.ids, t.weights)
    d.combine(routed.x, routed).sum().backward()
    return len(groups), all(g is not None and g.process_group is group for g in groups)


@pytest.mark.parametrize("settings", [{}, {"chunk_capacity": 1 << 20}], ids=str)
def test_messages_belong_to_the_dispatchers_group(settings: dict[str, Any]) -> None:
    of_ranks = run_ranks(groups_of_requests, 3, settings)
    assert all(own for _, own in of_ranks)
    assert min(number for number, _ in of_ranks[::2]) >= 4
