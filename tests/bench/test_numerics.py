"""The table of errors against float64: its figures on few elements."""

from __future__ import annotations

import pytest
import torch

from shardweave.bench.reliability.numerics import (
    DTYPES,
    Errors,
    errors_of,
    reduced,
    reduced_by_gloo,
    report,
    terms_of,
    ulp,
)

pytestmark = pytest.mark.plan


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_small_floats_are_rounded_once(dtype: torch.dtype) -> None:
    for op in ("sum", "avg", "prod", "max", "min"):
        for ranks in (2, 5):
            terms = terms_of(op, dtype, ranks, 257)
            found = errors_of(op, terms, reduced(op, dtype, terms))
            most = 0.0 if op in ("max", "min") else 0.5 + 1e-3 if dtype.itemsize < 4 else ranks
            assert found.equal and found.most <= most, (op, ranks, found)


def test_gloo_rounds_after_each_term() -> None:
    terms = terms_of("sum", torch.bfloat16, 8, 257)
    ours, gloos = errors_of("sum", terms, reduced("sum", torch.bfloat16, terms)), reduced_by_gloo("sum", terms)
    assert ours.most <= 0.501 < errors_of("sum", terms, gloos).most
    (average,) = reduced_by_gloo("avg", terms[:1])
    assert average.equal(terms[0])


def test_errors_are_found() -> None:
    terms = [torch.tensor([1.0, 2.0]), torch.tensor([0.0, 2.0])]
    right = torch.tensor([1.0, 4.0])
    assert errors_of("sum", terms, [right, right]) == Errors(0.0, 0.0, True)
    wrong = torch.tensor([1.0 + 2**-23, 4.0 + 2**-20])
    assert errors_of("sum", terms, [wrong, right]) == Errors(1.5, 2.0, False)
    assert str(Errors(1.5, 2.0, False)) == "1.50 / 2.00, replicas differ"
    for dtype in DTYPES:
        ones = torch.tensor([1.0, 1.5, 0.75], dtype=torch.float64)
        assert (ulp(ones, dtype) / torch.finfo(dtype).eps).tolist() == [1.0, 1.0, 0.5]


def test_report_has_every_reduction() -> None:
    text = report([2], 16)
    assert text.count("| shardweave |") == 15 and text.count("| gloo |") == 15 and "ERRORS" not in text
    assert "replicas differ" not in text
