"""The distinct values of an array. `np.unique` takes three times as long on a few hundred of them."""

from __future__ import annotations

import numpy as np


def distinct(values: np.ndarray) -> np.ndarray:
    """The distinct values of `values` [n], ascending; `values` itself if it is that already."""
    if (values[1:] > values[:-1]).all():
        return values
    ascending = np.sort(values)
    begins = np.ones(len(ascending), dtype=bool)
    np.not_equal(ascending[1:], ascending[:-1], out=begins[1:])
    return ascending[begins]


def numbered(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct values of `values` [n], ascending, and the index [n] among them of each value."""
    found = distinct(values)
    return found, np.arange(len(values)) if found is values else np.searchsorted(found, values)
