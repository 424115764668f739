"""What `python -m shardweave bench` measures, one file a suite; `pytest bench/` collects the same files.

A suite lists its cases, with the contenders of each, for one of the scales, and puts the results of those that are
selected into a sink (`bench/harness/measure.py`).
"""

from __future__ import annotations

SUITES = ("redistribute", "dispatch")
# Not measured unless named: one compiles for minutes, the other needs namespaces, and takes long.
ON_REQUEST = ("compiled", "hosts")
SCALES = ("full", "quick", "dry")  # dry: every line runs, on tiny sizes, and no figure means anything
