"""torch's functions that autoparallel calls while it traces, with the same parameters, on shardweave."""

from __future__ import annotations

from shardweave.runtime.dtensor.drop_in import redistribute_local_tensor
from shardweave.runtime.dtensor.ordered_local import ordered_redistribute_local_tensor

__all__ = ["ordered_redistribute_local_tensor", "redistribute_local_tensor"]
