"""Parameters of tests of which some combinations are for `make test-long`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest


def crossed(names: str, *values: Sequence[Any], gate: Callable[..., bool], **options: Any) -> pytest.MarkDecorator:
    """Parametrize a test over all combinations of the values, marked `long` where `gate` is false.

    Args:
        gate: called with one value of each sequence.
        options: of `pytest.mark.parametrize`.
    """
    cases = [pytest.param(*case, marks=() if gate(*case) else pytest.mark.long) for case in product(*values)]
    return pytest.mark.parametrize(names.split(", "), cases, **options)
