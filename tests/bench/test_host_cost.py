"""`python -m shardweave.bench.host_cost`: a checkout is measured by processes that import it."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardweave.bench.host_cost import KINDS, measured_of

pytestmark = pytest.mark.multi


def test_a_checkout_is_measured() -> None:
    found = measured_of(Path(__file__).resolve().parents[2])
    assert found.keys() == {*KINDS, "token dispatch, T 16", "plan(), cold"} and all(us > 0 for us in found.values())
