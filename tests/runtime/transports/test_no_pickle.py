"""Nothing that peers send is unpickled or evaluated: there is no such call, and a pickle in the store is refused."""

from __future__ import annotations

import os
import pickle
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rank_processes import run_ranks

import shardweave
from shardweave.bench.harness.gather_json import all_gather_json
from shardweave.errors import TransportError
from shardweave.runtime.transports import machines
from shardweave.runtime.transports.machines import Machines
from shardweave.runtime.transports.rendezvous.rendezvous import Rendezvous
from shardweave.runtime.transports.shared_memory.transport import SharedMemoryTransport
from shardweave.runtime.transports.symmetric_memory import rates
from shardweave.runtime.transports.symmetric_memory.memory import SharedSegments

pytestmark = pytest.mark.plan

ROOT = Path(shardweave.__file__).parent
FORBIDDEN = re.compile(
    r"\b(?:pickle|marshal|dill|cloudpickle)\.loads?\(|torch\.load\(|Unpickler|\w+_object(?:_list)?\(|(?<![.\w])(?:eval|exec)\("
)


def test_package_unpickles_nothing() -> None:
    packages = re.findall(
        r'^    "(shardweave[.\w]*)",$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE
    )
    folders = [ROOT.joinpath(*name.split(".")[1:]) for name in packages]
    assert len(folders) > 25 and all(folder.is_dir() for folder in folders)
    found = {
        match
        for folder in folders
        for path in folder.glob("*.py")
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
    for kind in ("waiting", "refused", "failed", "left", "failures", "session/0,1,2", "process", "machine"):
        store.set(f"{kind}/1", sent)
    transport = object.__new__(SharedMemoryTransport)
    transport.rendezvous = here
    of_ranks = Machines(here, None)
    for read in (
        lambda: here.reports.waiting(1),
        lambda: here.reports.failure(1),
        lambda: here.reports.left(1),
        lambda: here.failures.last_before((1,), [(mock.Mock(group_name="1"), (0, 1))]),
        lambda: here.errors.refusal(1),
        lambda: here.session((0, 1, 2)),
        lambda: transport._connect(1),
        lambda: of_ranks.node_of(1),
        lambda: machines._parsed_figures(1, sent.decode(errors="replace")),
        lambda: SharedSegments(0).join(torch.zeros(1), {1: sent.decode(errors="replace")}, "name"),
    ):
        with pytest.raises(TransportError, match=r"rank 1 wrote .* to the store; allowed: what this version"):
            read()
    assert not (tmp_path / "ran").exists()
    pickle.loads(sent)
    assert (tmp_path / "ran").exists()  # it would have run


def gathered(rank: int, values: list[Any]) -> list[Any]:
    return all_gather_json(values[rank])


@pytest.mark.multi
def test_plain_values_of_ranks_are_gathered_as_json() -> None:
    values = [None, {"refused": "é" * 3000, "numbers": [1, 2.5, True]}, ""]
    assert run_ranks(gathered, 3, values) == [values] * 3


WRONG = (
    "", "null", "7", "[]", "{}", '["a"]', "[1, 2, 3]", '["a", {}, 5]', '["a", {"1": 5}, {}]',
    '["a", {"1": {"1": 5}}, []]', '["a", {}, [[1, 2, 3]]]', '["a", {}, [[["x"], 2, "m"]]]',
    '["a", 1, [0], 1, 5, "d", {"0": "x"}, []]', '["a", 1, "0", 1, 5, "d", {}, []]',
    '["a", 1, [0], 1, 5, "d", {}, [true]]', "[" * 100_000, "1" * 5000,
)  # fmt: skip


@pytest.mark.parametrize("text", WRONG, ids=range(len(WRONG)))
def test_text_of_a_wrong_form_is_refused(text: str) -> None:
    store = dist.HashStore()
    rendezvous = Rendezvous(store, 0, 5.0, lambda rank: False)
    reads = {
        "waiting/1": lambda: rendezvous.reports.waiting(1),
        "refused/1": lambda: rendezvous.errors.refusal(1),
        "settings/1": lambda: rendezvous.errors.peer_status(1),
        "session/0,1/1": lambda: rendezvous.session((0, 1)),
    }
    for key, read in reads.items():
        store.set(key, text)
        if key != "session/0,1/1" and text == "" or key == "settings/1" and text == "{}":
            read()  # nothing is written, or no setting
        else:
            with pytest.raises(TransportError, match="rank 1 wrote .* to the store"):
                read()
        store.set(key, "")
    with pytest.raises(TransportError, match="rank 1 wrote .* to the store"):
        rates._parsed(1, text, 3)
