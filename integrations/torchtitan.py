"""Token dispatch for torchtitan: its dispatchers' interface, and the override that puts it into models."""

from __future__ import annotations

from shardweave.runtime.integrations.torchtitan import TorchtitanDispatcher, token_dispatcher

__all__ = ["TorchtitanDispatcher", "token_dispatcher"]
