"""The keys of torch.compile's caches: graphs in them depend on the settings of `install` and on this rank's process
groups, of which torch's keys say nothing."""

from __future__ import annotations

import hashlib
import re

import torch.compiler.config
import torch.distributed as dist

from ..supported_versions import installed_version

_OURS = re.compile(r";shardweave-[0-9a-f]{16}$")
_settings: str | None = None


def key_caches_by(settings: str | None) -> None:
    """Have the keys of torch's caches depend on these settings, the version, this rank and its process groups. None:
    restore the user's `torch.compiler.config.cache_key_tag`, to which this is appended."""
    global _settings
    _settings = settings
    refresh_cache_key()


def refresh_cache_key() -> None:
    """Take the current process groups into the keys. Called when a redistribution is traced: torch looks into its
    caches after Dynamo has run a function on fake tensors."""
    config = torch.compiler.config
    tag = _OURS.sub("", config.cache_key_tag)
    if _settings is not None:
        tag += f";shardweave-{_digest(_settings)}"
    if tag != config.cache_key_tag:
        config.cache_key_tag = tag


def _digest(settings: str) -> str:
    values: list[object] = [installed_version("shardweave"), settings]
    if dist.is_initialized():
        values.append(dist.get_rank())
        for group in dist.distributed_c10d._world.pg_group_ranks:
            if isinstance(group, dist.ProcessGroup):
                values.append((str(group.group_name), dist.get_process_group_ranks(group)))
    return hashlib.blake2b(repr(values).encode(), digest_size=8).hexdigest()
