"""Settings of token dispatchers in one dict."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from shardweave.runtime.moe.options import DispatchOptions

OPTIONS = {field.name for field in fields(DispatchOptions)}


def with_options(**settings: Any) -> dict[str, Any]:
    """Return the keywords of a dispatcher's constructor for these settings: the options among them as `options`."""
    options = {name: settings.pop(name) for name in OPTIONS & settings.keys()}
    return {**settings, "options": DispatchOptions(**options)}
