"""Errors of reductions against float64, beside gloo's.

`python -m shardweave.bench.reliability.numerics --out FILE` reduces random terms of 2 to 64 ranks to replicas, partial
to replicated, which is what an all-reduce does. shardweave's ranks are virtual, in this process: the order of a
reduction does not depend on the transport. gloo's ranks are threads of this process, each with a `ProcessGroupGloo`,
and make one `all_reduce`; an average is gloo's sum divided in the dtype. Nothing is timed.

The error of an element is its distance from the reduction in float64 of the same terms, in units in the last place
(ulp) of the latter: 0.5 or less is a reduction that is rounded once. Terms are positive, so that none cancel: where
they do, the relative error has no bound in any order.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...errors import ArgumentError
from ...planner import plan
from ...runtime.executor.simulate import simulate
from ..harness.machine import provenance
from ..harness.markdown import provenance_lines, table
from ..harness.writable import check_writable

ELEMENTS = 4096
RANKS = (2, 4, 8, 16, 32, 64)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
LAYOUTS = {"sum": "P", "avg": "Pavg", "prod": "Pprod", "max": "Pmax", "min": "Pmin"}
_GLOO_OPS: dict[str, Any] = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.SUM, "prod": dist.ReduceOp.PRODUCT}
_GLOO_DTYPES = DTYPES[:3]


@dataclass(frozen=True)
class Errors:
    """In ulp, over elements; and whether all replicas are equal to the bit."""

    mean: float
    most: float
    equal: bool

    def __str__(self) -> str:
        return f"{self.mean:.2f} / {self.most:.2f}" + ("" if self.equal else ", replicas differ")


def terms_of(op: str, dtype: torch.dtype, ranks: int, elements: int = ELEMENTS) -> list[torch.Tensor]:
    """A seeded random term of each rank, in the dtype: from 1/8 to 1, or for products within 1/8 of 1."""
    generator = torch.Generator().manual_seed(ranks)
    terms = torch.rand(ranks, elements, generator=generator, dtype=torch.float64)
    terms = (7 + 2 * terms) / 8 if op == "prod" else (1 + 7 * terms) / 8
    return list(terms.float().to(dtype))


def reduced(op: str, dtype: torch.dtype, terms: Sequence[torch.Tensor], **options: Any) -> list[torch.Tensor]:
    """shardweave's replicas; options are those of `simulate`."""
    name = str(dtype).removeprefix("torch.")
    return simulate(plan((len(terms),), terms[0].shape, name, LAYOUTS[op], "R"), terms, **options)


def reduced_by_gloo(op: str, terms: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The replicas of gloo's all_reduce."""
    store, size = dist.HashStore(), len(terms)

    def rank_main(rank: int) -> torch.Tensor:
        group: Any = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=120))
        options, result = dist.AllreduceOptions(), terms[rank].clone()
        options.reduceOp = _GLOO_OPS[op]
        group.allreduce([result], options).wait()
        group.barrier().wait()  # none closes its connections before
        return result / size if op == "avg" else result

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank_main, range(size)))


def errors_of(op: str, terms: Sequence[torch.Tensor], replicas: Sequence[torch.Tensor]) -> Errors:
    """The errors of the first replica."""
    exact = exact_of(op, terms)
    error = (replicas[0].double() - exact).abs() / ulp(exact, replicas[0].dtype)
    words = [replica.view(torch.uint8) for replica in replicas]
    return Errors(float(error.mean()), float(error.max()), all(word.equal(words[0]) for word in words))


def exact_of(op: str, terms: Sequence[torch.Tensor]) -> torch.Tensor:
    """The reduction in float64."""
    whole = torch.stack([term.double() for term in terms])
    if op in ("max", "min"):
        return getattr(whole, f"a{op}")(0)
    return whole.prod(0) if op == "prod" else whole.sum(0) / (len(terms) if op == "avg" else 1)


def ulp(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The distance of numbers of the dtype that are next to each other, at positive values in float64."""
    limits = torch.finfo(dtype)
    _, exponent = torch.frexp(values.clamp(min=limits.smallest_normal))
    return torch.ldexp(torch.full_like(values, limits.eps), exponent - 1)


def report(ranks: Sequence[int], elements: int = ELEMENTS) -> str:
    rows = []
    for op in ("sum", "avg", "prod"):
        for dtype in DTYPES:
            name = f"{op}, {str(dtype).removeprefix('torch.')}"
            ours, gloos = [], []
            for number in ranks:
                terms = terms_of(op, dtype, number, elements)
                ours.append(str(errors_of(op, terms, reduced(op, dtype, terms))))
                if dtype in _GLOO_DTYPES:
                    gloos.append(str(errors_of(op, terms, reduced_by_gloo(op, terms))))
            rows.append([name, "shardweave", *ours])
            rows.append([name, "gloo", *(gloos or ["does not reduce it"] + [""] * (len(ranks) - 1))])
    exact = all(
        errors_of(op, terms, reduced(op, dtype, terms)) == Errors(0.0, 0.0, True)
        for op in ("max", "min")
        for dtype in DTYPES
        for number in ranks
        for terms in [terms_of(op, dtype, number, elements)]
    )
    lines = [
        "# Numerics: errors of reductions",
        "",
        *provenance_lines(provenance()),
        "",
        f"{elements} elements, each reduced from one random term of each rank, from 1/8 to 1 (products: within 1/8 of",
        "1), in the dtype. The distance from the reduction in float64, mean / most over the elements, in units in the",
        "last place of the latter: 0.5 is one rounding. Replicas are equal to the bit unless a cell says otherwise.",
        "",
        *table(["reduction", "by", *(f"{n} ranks" for n in ranks)], rows),
        "",
        f"max and min of the same dtypes and ranks: {'no error' if exact else 'ERRORS'} by shardweave.",
        "",
        "shardweave combines the terms in the order of ranks, 8- and 16-bit floats in float32, and rounds once. gloo",
        "does so in the dtype, in an order of its own.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write the report there instead of printing it")
    parser.add_argument("--most", type=int, default=max(RANKS), metavar="N", help="ranks (default: %(default)s)")
    arguments = parser.parse_args()
    try:
        if not min(RANKS) <= arguments.most <= max(RANKS):
            raise ArgumentError(f"--most: {arguments.most}; allowed: {min(RANKS)} to {max(RANKS)}")
        check_writable("--out", arguments.out)
    except ArgumentError as error:
        parser.error(str(error))
    text = report([n for n in RANKS if n <= arguments.most])
    if arguments.out is None:
        print(text)
    else:
        arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
