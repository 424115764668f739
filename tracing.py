"""Traces of the redistributions of a program, and flight records of calls that hang."""

from __future__ import annotations

from shardweave.runtime.flight_recorder import dump_flight_records
from shardweave.runtime.tracing.record import record

__all__ = ["dump_flight_records", "record"]
