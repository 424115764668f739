"""Workloads, the demo and benchmarks: what shardweave costs beside what stock torch costs."""

from __future__ import annotations
