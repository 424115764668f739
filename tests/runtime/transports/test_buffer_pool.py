"""Memory that is lent to one tensor at a time."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from shardweave.runtime.transports.buffer_pool import Leases

pytestmark = pytest.mark.plan


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU: torch.cuda.is_available() is False")
    return request.param


def leases(number: int, device: str = "cpu", nbytes: int = 64) -> Leases:
    memory = {rank: torch.zeros(number * nbytes, dtype=torch.uint8, device=device) for rank in range(3)}
    return Leases(1, memory, nbytes, number)


def test_a_piece_is_free_when_the_last_tensor_on_it_is_gone(device):
    of = leases(2, device)
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


def test_autograd_holds_what_it_saves(device):
    of = leases(1, device)
    x = of.lend().view(torch.float32).fill_(2.0)
    weight = torch.ones(16, requires_grad=True, device=device)
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
    assert len({of.number(tensor) for tensor in [of.lend() for _ in range(4)]}) == 4
    assert None not in [of.lend() for _ in range(4)]


def test_memory_outlives_who_lends_it(device):
    of = leases(1, device)
    lent = of.lend()
    del of
    gc.collect()
    assert lent.fill_(7).tolist() == [7] * 64


@pytest.mark.gpu
def test_what_a_graph_writes_is_lent_to_graphs_alone(device):
    if device == "cpu":
        pytest.skip("graphs are of GPUs")
    of = leases(2, device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lent = of.lend()
        lent.fill_(3)
    number = of.number(lent)
    del lent
    other = of.lend()
    assert other is not None and of.number(other) != number and of.lend() is None
    graph.replay()
    assert of.pieces[number][1].unique().tolist() == [3] and not other.any()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        again = of.lend()
        again.fill_(4)
    assert of.number(again) == number and of.lend() is None


@pytest.mark.gpu
def test_another_stream_waits_for_the_last_one(device):
    if device == "cpu":
        pytest.skip("streams are of GPUs")
    of, side = leases(1, device, 1 << 20), torch.cuda.Stream()
    lent = of.lend()
    torch.cuda._sleep(50_000_000)
    read = lent.clone()
    del lent
    with torch.cuda.stream(side):
        of.lend().fill_(9)
    torch.cuda.synchronize()
    assert not read.any()
