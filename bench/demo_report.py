"""What the ranks found, put together: one result for each case, one table, one JSON object."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from .terminal import show_table

_LEAST_RATIO = 3.0
_MOST_OF_A_COPY = 1.5
_SHORT = {"_into_tensor": "", "_tensor": "", "_single": "", "_coalesced": ""}


@dataclass(frozen=True)
class Result:
    """One case on all ranks. Times are milliseconds a call: the median over rounds of the slowest rank."""

    name: str
    mesh: tuple[int, ...]
    mesh_names: tuple[str, ...]
    source: str
    target: str
    shape: tuple[int, ...]
    dtype: str
    stock_plan: dict[str, int]
    plan: list[str]
    bytes_received: list[int]
    bytes_bound: list[int] | None
    torch_ms: float
    shardweave_ms: float
    copy_ms: float
    faults: list[str]
    stock_faults: list[str]

    @classmethod
    def of(cls, name: str, by_rank: list[dict[str, Any]]) -> Result:
        """From what each rank sent, in rank order."""
        first = by_rank[0]
        faults = [f"rank {rank}: {found['fault']}" for rank, found in enumerate(by_rank) if found["fault"]]
        digests: dict[str, dict[str, int]] = {}
        for rank, found in enumerate(by_rank):
            digests.setdefault(found["box"], {}).setdefault(found["digest"], rank)
        faults += [f"replicas differ: ranks {sorted(d.values())}" for d in digests.values() if len(d) > 1]
        if first["bytes_bound"] is not None and first["bytes_received"] != first["bytes_bound"]:
            faults.append(f"receives {first['bytes_received']} bytes where {first['bytes_bound']} are enough")

        def milliseconds(side: str) -> float:
            rounds = zip(*(found["seconds"][side] for found in by_rank), strict=True)
            return statistics.median(map(max, rounds)) * 1e3

        return cls(
            name=name,
            mesh=tuple(first["mesh"]),
            mesh_names=tuple(first["mesh_names"]),
            source=first["source"],
            target=first["target"],
            shape=tuple(first["shape"]),
            dtype=first["dtype"],
            stock_plan=first["stock_plan"],
            plan=first["plan"],
            bytes_received=first["bytes_received"],
            bytes_bound=first["bytes_bound"],
            torch_ms=milliseconds("stock"),
            shardweave_ms=milliseconds("ours"),
            copy_ms=milliseconds("copy"),
            faults=faults,
            stock_faults=[
                f"rank {r}: {found['stock_fault']}" for r, found in enumerate(by_rank) if found["stock_fault"]
            ],
        )

    @property
    def ratio(self) -> float:
        return self.torch_ms / self.shardweave_ms

    @property
    def counted(self) -> bool:
        """Where nothing has to move there is nothing to be faster at."""
        return any(self.bytes_received if self.bytes_bound is None else self.bytes_bound)

    @property
    def slow(self) -> bool:
        """Counted, under the least ratio, and not explained by what one bare copy of the bytes costs."""
        return self.counted and self.ratio < _LEAST_RATIO and self.shardweave_ms > _MOST_OF_A_COPY * self.copy_ms

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "mesh": self.mesh,
            "source": self.source,
            "target": self.target,
            "shape": self.shape,
            "dtype": self.dtype,
            "torch_plan": self.stock_plan,
            "shardweave_plan": self.plan,
            "torch_ms": self.torch_ms,
            "shardweave_ms": self.shardweave_ms,
            "copy_ms": self.copy_ms,
            "ratio": self.ratio,
            "counted": self.counted,
            "equal": not self.faults,
            "torch_equal": not self.stock_faults,
            "faults": self.faults + [f"torch, {fault}" for fault in self.stock_faults],
            "bytes_received": self.bytes_received,
            "bytes_bound": self.bytes_bound,
        }


def summary(results: list[Result]) -> dict[str, Any]:
    """Over the counted cases: median, least ratio and its case; those that are too slow."""
    counted = [result for result in results if result.counted]
    least = min(counted, key=lambda result: result.ratio, default=None)
    return {
        "median_ratio": statistics.median(result.ratio for result in counted) if counted else None,
        "min_ratio": least.ratio if least else None,
        "min_case": least.name if least else None,
        "counted": len(counted),
        "slow": [result.name for result in results if result.slow],
    }


def summary_line(results: list[Result]) -> str:
    found = summary(results)
    if not found["counted"]:
        return "nothing has to move between these ranks, so nothing is counted"
    cases = "case" if found["counted"] == 1 else "cases"
    line = (
        f"{found['counted']} counted {cases}: median ratio {found['median_ratio']:.1f}, "
        f"least {found['min_ratio']:.1f} ({found['min_case']})"
    )
    if found["slow"]:
        line += f"; under {_LEAST_RATIO:g} and over {_MOST_OF_A_COPY:g} copies: {', '.join(found['slow'])}"
    return line


def show_results(console: Console, title: str, results: list[Result]) -> None:
    """Bytes are those of the rank that receives most."""
    texts = ("case", "mesh", "layouts", "torch's plan", "shardweave's plan")
    figures = ("received\nMB", "bound\nMB", "torch\nms", "shardweave\nms", "bare copy\nms", "ratio")
    rows = []
    for result in results:
        bound = "-" if result.bytes_bound is None else _megabytes(max(result.bytes_bound))
        ratio = f"{result.ratio:.1f}" if result.counted else f"({result.ratio:.1f})"
        wrong = " [red]WRONG[/red]" if result.faults else ""
        row = (
            result.name,
            " ".join(f"{name}{size}" for name, size in zip(result.mesh_names, result.mesh, strict=True)),
            f"{result.source} → {result.target}",
            _collectives(result.stock_plan) + (" [yellow]wrong[/yellow]" if result.stock_faults else ""),
            _steps(result.plan) + wrong,
            _megabytes(max(result.bytes_received)),
            bound,
            f"{result.torch_ms:.2f}",
            f"{result.shardweave_ms:.3f}",
            f"{result.copy_ms:.3f}",
            ratio,
        )
        rows.append(row)
    show_table(console, title, texts, figures, rows)


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.2f}"


def _collectives(counts: dict[str, int]) -> str:
    short: Counter[str] = Counter()
    for name, count in counts.items():
        for ending, nothing in _SHORT.items():
            name = name.replace(ending, nothing)
        short[name] += count
    return ", ".join(name if count == 1 else f"{count} {name}" for name, count in short.items()) or "local"


def _steps(steps: list[str]) -> str:
    return "; ".join(steps) or "nothing"
