"""Memory that is lent to one tensor at a time."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from shardweave.runtime.leases import Leases

pytestmark = pytest.mark.plan


def leases(number: int, nbytes: int = 64) -> Leases:
    return Leases(1, {rank: torch.zeros(number * nbytes, dtype=torch.uint8) for rank in range(3)}, nbytes, number)


def test_a_piece_is_free_when_the_last_tensor_on_it_is_gone():
    of = leases(2)
    a, b = of.lend(), of.lend()
    assert a is not None and b is not None and of.lend() is None
    assert {of.number(a), of.number(b)} == {0, 1} and of.number(torch.zeros(3)) is None
    for tensor in (a, b):
        assert tensor.data_ptr() == of.pieces[of.number(tensor)][1].data_ptr() and tensor.storage_offset() == 0
    view, number = a.view(torch.float32)[3:], of.number(a)
    del a
    assert of.lend() is None
    view.fill_(1.0)
    assert of.pieces[number][1].view(torch.float32).tolist() == [0.0] * 3 + [1.0] * 13
    del view
    again = of.lend()
    assert again is not None and of.number(again) == number


def test_autograd_holds_what_it_saves():
    of = leases(1)
    x = of.lend().view(torch.float32).fill_(2.0)
    weight = torch.ones(16, requires_grad=True)
    y = (x * weight).sum()
    del x
    assert of.lend() is None
    y.backward()
    assert weight.grad.tolist() == [2.0] * 16
    del y
    gc.collect()
    assert of.lend() is not None


def test_pieces_are_given_back_on_any_thread():
    of = leases(4)
    held = [[of.lend() for _ in range(2)] for _ in range(2)]
    threads = [threading.Thread(target=tensors.clear) for tensors in held]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({of.number(tensor) for tensor in [of.lend() for _ in range(4)]}) <= 4
    assert None not in [of.lend() for _ in range(4)]


def test_memory_outlives_who_lends_it():
    of = leases(1)
    lent = of.lend()
    del of
    gc.collect()
    assert lent.fill_(7).tolist() == [7] * 64
