"""torch's TokenSwitch on token dispatchers. It needs torch 2.15 or newer."""

from __future__ import annotations

import torch

try:
    from shardweave.runtime.integrations.token_switch.token_switch import TokenSwitch
except ImportError as error:
    if error.name != "torch.distributed._token_switch":
        raise
    raise ImportError(
        f"TokenSwitch: torch is {torch.__version__}; allowed: 2.15 or newer, for {error.name}", name=error.name
    ) from error

__all__ = ["TokenSwitch"]
