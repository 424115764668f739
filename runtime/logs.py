"""Logging by SHARDWEAVE_LOGS. Where the variable is not set, loggers are left as the program configures them."""

from __future__ import annotations

import logging
import os

import torch.distributed as dist

from .environment import requested_logs

_FORMAT = "%(rank)s %(levelname).1s %(asctime)s.%(msecs)03d %(name)s: %(message)s"


class _Handler(logging.StreamHandler):
    """Writes to standard error, with the rank at the start of each line."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(_FORMAT, "%H:%M:%S"))

    def format(self, record: logging.LogRecord) -> str:
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else os.environ.get("RANK")
        record.rank = "[shardweave]" if rank is None else f"[rank{rank}]"
        return super().format(record)


def set_up_logs() -> None:
    """Set the levels that SHARDWEAVE_LOGS asks for, and write shardweave's messages to standard error only: with their
    own handler they no longer go to those of the root logger. Does nothing if the variable is not set.

    Raises:
        ArgumentError: a name that is not known.
    """
    levels = requested_logs()
    if not levels:
        return
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    logger = logging.getLogger("shardweave")
    if not any(isinstance(handler, _Handler) for handler in logger.handlers):
        logger.addHandler(_Handler())
        logger.propagate = False
