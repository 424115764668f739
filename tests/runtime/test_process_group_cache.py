"""`ProcessGroupCache`: its limit, and when it is emptied."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from shardweave.runtime import process_group_cache
from shardweave.runtime.process_group_cache import ProcessGroupCache, forget_dead_groups

pytestmark = pytest.mark.plan


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group_cache, "_caches", [])
    monkeypatch.setattr(process_group_cache, "_destroy_callbacks", [])


@pytest.mark.parametrize("max_entries", [1, 5, 16])
def test_full_cache_drops_the_oldest_entries(max_entries: int) -> None:
    cache: ProcessGroupCache[int, int] = ProcessGroupCache(max_entries)
    for n in range(100):
        cache[n] = -n
        assert len(cache) <= max_entries and cache.get(n) == -n
        assert sorted(cache) == list(range(n + 1 - len(cache), n + 1))
        assert len(cache) > min(n, max_entries - 1 - max_entries // 8)


def test_cache_is_emptied_with_the_process_group(tmp_path: object) -> None:
    cache: ProcessGroupCache[str, int] = ProcessGroupCache(4)
    destroyed: list[int] = []
    process_group_cache.on_group_destroyed(lambda: destroyed.append(len(cache)))
    for group in range(2):
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/{group}", rank=0, world_size=1)
        forget_dead_groups()
        before = len(destroyed)
        cache["key"] = group
        forget_dead_groups()
        assert cache == {"key": group} and len(destroyed) == before
        dist.destroy_process_group()
        assert cache == {} and destroyed[before:] == [0]
