"""Finds the loops of `loops_cpu`, compiles them by numba, and calls them."""

from __future__ import annotations

import ctypes
import fcntl
import importlib
import itertools
import logging
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from typing import Any

import torch

from ...errors import ArgumentError

_log = logging.getLogger(__name__)

_PARALLEL = 1 << 20  # bytes that are worth another thread


class Loop:
    """A compiled loop, whose first parameters are `first` and `end`: it does these iterations.

    Args:
        name: of the function in `loops_cpu` that makes it.
        of: what it is made for.

    Raises:
        Exception: numba is not there, or does not compile it.
    """

    def __init__(self, name: str, *of: torch.dtype) -> None:
        self.name = name
        # Imported here: few processes need it, and numba takes some time.
        function, signature = getattr(importlib.import_module(".loops_cpu", __package__), name)(*of)
        self._compiled = _compiled(function, signature)
        # Called by address, without Python's lock. Pointers are passed as numbers of 64 bits are.
        self._call = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(signature.args))(self._compiled.address)

    def __call__(self, number: int, nbytes: int, *parameters: torch.Tensor | int | None) -> None:
        """Do `number` iterations.

        Args:
            nbytes: that they read and write. From 2 MiB on torch's number of threads share the iterations, which then
                must not depend on one another. 0: one thread does them, in order.
            parameters: those after `first` and `end`; of tensors their addresses, of None 0.

        Raises:
            ArgumentError: a tensor has elements and no memory.
        """
        given = [x if isinstance(x, int) else 0 if x is None else memory_address(x) for x in parameters]
        threads = min(torch.get_num_threads(), nbytes // _PARALLEL, number)
        if threads > 1:
            self._in_threads([number * i // threads for i in range(threads + 1)], given)
        else:
            self._call(0, number, *given)

    def _in_threads(self, bounds: list[int], parameters: list[int]) -> None:
        pool, futures = _threads(os.getpid()), []
        try:
            for first, end in itertools.pairwise(bounds[1:]):
                try:
                    futures.append(pool.submit(self._call, first, end, *parameters))
                except RuntimeError:  # there are no more threads, as when the interpreter ends
                    self._call(first, end, *parameters)
            self._call(bounds[0], bounds[1], *parameters)
        finally:
            _wait_for(futures)


def _compiled(function: Callable[..., None], signature: Any) -> Any:
    """The function, from numba's cache if it is there: in NUMBA_CACHE_DIR, or else beside the source, or else in the
    user's cache folder; if none can be written, it is compiled by each process."""
    import numba

    try:
        folder = numba.njit(cache=True)(function).stats.cache_path
        # Processes that write at once could leave the code of one under the name of another, and one that reads
        # meanwhile could get code of an older source. Besides, of ranks that start together only one compiles.
        with open(f"{folder}/shardweave-loops.lock", "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            return numba.cfunc(signature, cache=True)(function)
    except (RuntimeError, OSError):
        return numba.cfunc(signature)(function)


def _wait_for(futures: list[Future[None]]) -> None:
    """Wait for the threads, also if a signal's handler raises: until then they use the caller's memory."""
    interrupt: BaseException | None = None
    for future in futures:
        while not future.done():
            try:
                wait([future])
            except BaseException as error:
                interrupt = error
    if interrupt is not None:
        raise interrupt


@cache
def _threads(pid: int) -> ThreadPoolExecutor:
    """Those of a process: a forked one has none of its parent's."""
    return ThreadPoolExecutor(torch.get_num_threads(), "shardweave-rows")


def memory_address(x: torch.Tensor) -> int:
    """Return the address of a tensor's first element; 0 if it has none.

    Raises:
        ArgumentError: it has elements and no memory.
    """
    address = x.data_ptr()
    if not address and x.numel():
        kind = type(x).__name__
        raise ArgumentError(f"a {kind} of shape {tuple(x.shape)} without memory; allowed: a tensor with memory")
    return address


@cache
def compiled_loop(name: str, *of: torch.dtype) -> Loop | None:
    """Return a loop, or None, with a warning, if it is not compiled here: then torch operations take its place."""
    try:
        return Loop(name, *of)
    except Exception as error:
        _warn(_reason(error))
        return None


def why_not_compiled() -> str | None:
    """Why loops are not compiled in this process; None: they are."""
    try:
        Loop("values")
    except Exception as error:
        return _reason(error)
    return None


def _reason(error: Exception) -> str:
    missing = isinstance(error, ModuleNotFoundError) and error.name == "numba"
    return "numba is not installed: pip install 'shardweave[cpu]'" if missing else f"numba fails: {error}"


@cache
def _warn(why: str) -> None:
    """Once in a process."""
    _log.warning(f"torch operations dispatch and combine tokens on CPUs, in several times the time of loops: {why}")
