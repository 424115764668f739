"""Nothing that peers send is unpickled or evaluated: there is no such call, and a pickle in the store is refused."""

from __future__ import annotations

import os
import pickle
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import shardweave
from shardweave.errors import TransportError
from shardweave.runtime.transports.rendezvous.rendezvous import Rendezvous
from shardweave.runtime.transports.select import Transports
from shardweave.runtime.transports.shared_memory.transport import SharedMemoryTransport

pytestmark = pytest.mark.plan

ROOT = Path(shardweave.__file__).parent
FORBIDDEN = re.compile(
    r"\b(?:pickle|marshal|dill|cloudpickle)\.loads?\(|torch\.load\(|Unpickler|\w+_object(?:_list)?\(|(?<![.\w])(?:eval|exec)\("
)


def test_runtime_unpickles_nothing() -> None:
    found = {
        match
        for folder in ("runtime", "planner", "kernels")
        for path in (ROOT / folder).rglob("*.py")
        for match in FORBIDDEN.findall(path.read_text(encoding="utf-8"))
    }
    assert found == {"lookup_object("}  # of torch's checkpoints, on this rank's own objects
    calls = "pickle.loads(x)", "dist.all_gather_object(a, b)", "torch.load(f)", "eval(text)", "dist.recv_object_list(x)"
    assert all(map(FORBIDDEN.search, calls))


class Attack:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", [0, pickle.HIGHEST_PROTOCOL])
def test_pickle_in_the_store_is_refused(tmp_path: Path, protocol: int) -> None:
    sent = pickle.dumps(Attack(tmp_path / "ran"), protocol)
    store = dist.HashStore()
    here, there = (Rendezvous(store, rank, 5.0, lambda rank: False) for rank in (0, 1))
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda one: one.session((0, 1)), (here, there)))
    for key in ("waiting/1", "refused/1", "session/0,1,2/1", "process/1", "machine/1", "failed/1"):
        store.set(key, sent)
    transport = object.__new__(SharedMemoryTransport)
    transport.rendezvous = here
    transports = object.__new__(Transports)
    transports.rendezvous, transports._nodes, transports._node_size = here, {}, None
    for read in (
        lambda: here.reports.waiting(1),
        lambda: here.errors.refusal(1),
        lambda: here.session((0, 1, 2)),
        lambda: transport._connect(1),
        lambda: transports._node_of(1),
    ):
        with pytest.raises(TransportError, match=r"rank 1 wrote .* to the store; allowed: what this version"):
            read()
    assert isinstance(here.reports.failure(1), str)  # any text is shown as it is
    assert not (tmp_path / "ran").exists()
    pickle.loads(sent)
    assert (tmp_path / "ran").exists()  # it would have run
