"""Parameters of tests of which some combinations are for `make test-long`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import product
from random import Random
from typing import Any

import pytest

PARTS = int(os.environ.get("SHARDWEAVE_TEST_PARTS", "1"))


def crossed(names: str, *values: Sequence[Any], gate: Callable[..., bool], **options: Any) -> pytest.MarkDecorator:
    """Parametrize a test over the combinations of the values for which `gate` is true, and, marked `long`, over some of
    the others: for each part of SHARDWEAVE_TEST_PARTS as many as there are of the former, drawn by seed.

    Args:
        gate: called with one value of each sequence.
        options: of `pytest.mark.parametrize`.
    """
    combined = list(product(*values))
    first = [case for case in combined if gate(*case)]
    others = [i for i, case in enumerate(combined) if not gate(*case)]
    drawn = sorted(Random(names).sample(others, min(PARTS * len(first), len(others))))
    cases = [pytest.param(*case) for case in first]
    cases += [pytest.param(*combined[i], marks=pytest.mark.long) for i in drawn]
    return pytest.mark.parametrize(names.split(", "), cases, **options)
