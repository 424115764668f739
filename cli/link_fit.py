"""Fit the latency and bandwidth of links to the times of exchanges, robustly against outliers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from ..planner import Link, Topology

_NEARLY_ZERO = 1e-12
_LEAST_SCALE = 0.15  # so that no error below 70 % is an outlier: links are not exactly linear
_TUKEY = 4.685  # Tukey's bisquare constant: 95 % efficiency for normal errors


@dataclass(frozen=True)
class Sample:
    """The time of one size of exchange over a link, or of a copy inside a rank.

    Attributes:
        peers: the number of ranks that each rank sends to.
        nbytes: bytes that a rank sends; it receives as many.
        copied: bytes that the price of a step counts as copied inside a rank.
        us: microseconds of a call: the median over rounds of the slowest rank.
    """

    peers: int
    nbytes: int
    copied: int
    us: float


@dataclass(frozen=True)
class Fit:
    """A fitted link, and notes about figures that could not be determined."""

    link: Link
    notes: tuple[str, ...] = ()


class Local(NamedTuple):
    """The costs inside a rank: `Topology`'s figures of the same names, and notes about what could not be determined."""

    call_us: float
    memory_gigabytes_per_s: float
    notes: tuple[str, ...] = ()

    def us(self, copied: float) -> float:
        """Microseconds of a call that copies so many bytes inside the rank."""
        return self.call_us + 2 * copied / (self.memory_gigabytes_per_s * 1e3)


def fit_local(samples: Sequence[Sample]) -> Local:
    """Fit calls that copy inside a rank, of different sizes. Bytes read and bytes written both count."""
    times = [s.us for s in samples]
    call, per_byte = fit_line([[1.0, s.copied] for s in samples], times, times)
    per_byte, notes = _per_byte(per_byte, samples)
    return Local(_rounded(call), _rounded(2 / (per_byte * 1e3)), notes)


def fit_link(samples: Sequence[Sample], one_sided: bool, local: Local) -> Fit:
    """Fit latency, bandwidth and the cost of a peer, as a `Link` defines them.

    The costs inside a rank are subtracted first. With one number of peers only, the cost of a peer is 0 and part of the
    latency; if time does not grow with bytes, the bandwidth is a lower bound. Notes say so.
    """
    several = len({s.peers for s in samples}) > 1
    notes = () if several else ("one number of peers: what a peer costs is part of the latency",)
    rows = [[1.0, s.nbytes, *([s.peers] if several else [])] for s in samples]
    left = [s.us - local.us(s.copied) for s in samples]
    latency, per_byte, *peer = fit_line(rows, left, [s.us for s in samples])
    per_byte, more = _per_byte(per_byte, samples)
    if latency <= 0:
        more += ("calls, peers and bytes explain all of the time: the latency of a step is 0",)
    figures = _rounded(latency), _rounded(1 / (per_byte * 1e3))
    return Fit(Link(*figures, one_sided, *map(_rounded, peer)), notes + more)


def _per_byte(fitted: float, samples: Sequence[Sample]) -> tuple[float, tuple[str, ...]]:
    """Microseconds per byte: as fitted; if that is 0, those of the largest sample, and a note."""
    if fitted > 0:
        return fitted, ()
    most, us = max((s.nbytes or s.copied, s.us) for s in samples)
    return us / most, (f"time does not grow with bytes up to {most}: the bandwidth is the least that it can be",)


def _rounded(figure: float) -> float:
    """Round to four significant digits."""
    return float(f"{figure:.4g}")


def fit_line(rows: Sequence[Sequence[float]], values: Sequence[float], scales: Sequence[float]) -> list[float]:
    """The coefficients >= 0, one per column of `rows`, that fit `values` best; errors are relative to `scales`.

    Iteratively reweighted least squares with Tukey's weights, started from the least absolute errors, so that a few
    outliers of any size have no influence.
    """
    scale = np.asarray(scales, dtype=np.float64)
    x = np.asarray(rows, dtype=np.float64) / scale[:, None]
    y = np.asarray(values, dtype=np.float64) / scale
    weights = np.ones(len(y))
    for _ in range(60):
        coefficients = _least_squares(x, y, weights)
        weights = 1 / np.maximum(np.abs(y - x @ coefficients), _NEARLY_ZERO)
    for _ in range(30):
        error = np.abs(y - x @ coefficients)
        spread = max(1.4826 * float(np.median(error)), _LEAST_SCALE)
        weights = np.maximum(1 - (error / (_TUKEY * spread)) ** 2, 0) ** 2
        coefficients = _least_squares(x, y, weights)
    return coefficients.tolist()


def _least_squares(x: np.ndarray, y: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The best coefficients >= 0; every subset of the few columns is tried."""
    root = np.sqrt(weights)
    best, least = np.zeros(x.shape[1]), float((weights * y**2).sum())
    for count in range(1, x.shape[1] + 1):
        for columns in map(list, combinations(range(x.shape[1]), count)):
            part = x[:, columns] * root[:, None]
            size = np.linalg.norm(part, axis=0)  # latencies and bytes differ by many orders
            size[size == 0] = 1.0
            solved = np.linalg.lstsq(part / size, y * root, rcond=None)[0] / size
            if (solved < 0).any():
                continue
            candidate = np.zeros(x.shape[1])
            candidate[columns] = solved
            error = float((weights * (y - x @ candidate) ** 2).sum())
            if error < least:
                best, least = candidate, error
    return best


def topology_of(measurements: Sequence[dict[str, Any]], name: str | None) -> tuple[Topology, list[str]]:
    """Fit a topology to rank 0's measurements; returns it and the notes of its report."""
    by_kind = {measured["kind"]: measured for measured in measurements}
    nodes, node_size = by_kind["local"]["nodes"], by_kind["local"]["node_size"]
    local = fit_local(samples_of(by_kind["local"]))
    fits: dict[str, Fit] = {}
    for kind in ("node", "network"):
        if kind in by_kind:
            one_sided = by_kind[kind]["transport"] == "shared_memory"
            fits[kind] = fit_link(samples_of(by_kind[kind]), one_sided, local)
    notes = [f"local: {note}" for note in local.notes]
    notes += [f"{kind}: {note}" for kind, fit in fits.items() for note in fit.notes]
    if nodes == 1:
        where = "in the process_group transport" if "network" in fits else "as inside the node"
        notes.append(f"No network was measured: all ranks share one node. `network` has the figures {where}.")
    if node_size == 1:
        notes.append("No link inside a node was measured: each has one rank. `node` has the figures of the network.")
    links: dict[str, Link] = {kind: fit.link for kind, fit in fits.items()}
    node, network = links.get("node") or links["network"], links.get("network") or links["node"]
    if name is None:
        name = f"{nodes} node{'s' * (nodes > 1)} of {node_size} rank{'s' * (node_size > 1)}, measured"
    nodes_of = None if nodes == 1 else node_size
    return Topology(name, nodes_of, node, network, local.memory_gigabytes_per_s, local.call_us), notes


def samples_of(measured: dict[str, Any]) -> list[Sample]:
    return [Sample(**sample) for sample in measured["samples"]]
