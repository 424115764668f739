"""The distinct values of an array, and which values are among others: faster than `np.unique` and `np.isin`."""

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


def is_among(values: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """[n] whether each of `values` [n] is one of `chosen`; whole numbers of -1 and up."""
    most = max(int(values.max(initial=0)), int(chosen.max(initial=0)))
    if most >= 8 * (len(values) + 128):  # a table would be larger than the values
        return np.isin(values, chosen)
    table = np.zeros(most + 2, dtype=bool)  # the last one is that of -1
    table[chosen] = True
    return table[values]
