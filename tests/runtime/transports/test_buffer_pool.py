"""BufferPool: a piece is in use until the last tensor on it is gone."""

from __future__ import annotations

import threading

import pytest
import torch

from shardweave.runtime.transports.buffer_pool import BufferPool

pytestmark = pytest.mark.plan


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU: torch.cuda.is_available() is False")
    return request.param


def buffer_pool(number: int, device: str = "cpu", nbytes: int = 64) -> BufferPool:
    memory = {rank: torch.zeros(number * nbytes, dtype=torch.uint8, device=device) for rank in range(3)}
    return BufferPool(1, memory, nbytes, number)


def test_piece_is_free_when_last_tensor_is_gone(device):
    pool = buffer_pool(2, device)
    a, b = pool.take(), pool.take()
    assert a is not None and b is not None and pool.take() is None
    assert {pool.number(a), pool.number(b)} == {0, 1} and pool.number(torch.zeros(3)) is None
    for tensor in (a, b):
        assert tensor.data_ptr() == pool.pieces[pool.number(tensor)][1].data_ptr() and tensor.storage_offset() == 0
    view, number = a.view(torch.float32)[3:], pool.number(a)
    del a
    assert pool.take() is None
    view.fill_(1.0)
    assert pool.pieces[number][1].view(torch.float32).tolist() == [0.0] * 3 + [1.0] * 13
    del view
    again = pool.take()
    assert again is not None and pool.number(again) == number


def test_pieces_are_freed_on_any_thread():
    pool = buffer_pool(4)
    held = [[pool.take() for _ in range(2)] for _ in range(2)]
    threads = [threading.Thread(target=tensors.clear) for tensors in held]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({pool.number(tensor) for tensor in [pool.take() for _ in range(4)]}) == 4
    assert None not in [pool.take() for _ in range(4)]


@pytest.mark.gpu
def test_captured_piece_is_reused_by_captures_only(device):
    if device == "cpu":
        pytest.skip("CUDA graphs need a GPU")
    pool = buffer_pool(2, device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        buffer = pool.take()
        buffer.fill_(3)
    number = pool.number(buffer)
    del buffer
    other = pool.take()
    assert other is not None and pool.number(other) != number and pool.take() is None
    graph.replay()
    assert pool.pieces[number][1].unique().tolist() == [3] and not other.any()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        again = pool.take()
        again.fill_(4)
    assert pool.number(again) == number and pool.take() is None


@pytest.mark.gpu
def test_next_stream_waits_for_last_one(device):
    if device == "cpu":
        pytest.skip("streams need a GPU")
    pool, side = buffer_pool(1, device, 1 << 20), torch.cuda.Stream()
    buffer = pool.take()
    torch.cuda._sleep(50_000_000)
    read = buffer.clone()
    del buffer
    with torch.cuda.stream(side):
        pool.take().fill_(9)
    torch.cuda.synchronize()
    assert not read.any()
