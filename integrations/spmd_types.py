"""Redistribution of plain tensors by spmd_types' types; `install(spmd_types=True)` carries out its collectives."""

from __future__ import annotations

from shardweave.runtime.integrations.spmd_types.redistribute_spmd import redistribute_spmd

__all__ = ["redistribute_spmd"]
