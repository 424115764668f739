"""Errors of the system that tell of a limit of this process or machine, and nothing of a peer."""

from __future__ import annotations

import errno
import resource

_LIMITS = {
    errno.EMFILE: (resource.RLIMIT_NOFILE, "open descriptors", "ulimit -n"),
    errno.ENOMEM: (resource.RLIMIT_AS, "bytes of address space", "ulimit -v"),
    errno.EFBIG: (resource.RLIMIT_FSIZE, "bytes in a file, which shared memory is", "ulimit -f"),
}
_OTHERS = {
    errno.ENFILE: "the machine has no free descriptors (sysctl fs.file-max)",
    errno.ENOSPC: "the file system is full",
}
_UNLIMITED = {errno.ENOMEM: "the machine has no memory for it, or the process no mappings (sysctl vm.max_map_count)"}


def own_limit(error: OSError) -> str | None:
    """The limit that an error of the system tells of, with its value and its name; None if it tells of none."""
    if error.errno in _LIMITS:
        which, what, name = _LIMITS[error.errno]
        limit, _ = resource.getrlimit(which)
        if limit != resource.RLIM_INFINITY:
            return f"{error}; this process may have {limit} {what} ({name}); allowed: a higher limit"
        return f"{error}; {_UNLIMITED[error.errno]}" if error.errno in _UNLIMITED else None
    return f"{error}; {_OTHERS[error.errno]}" if error.errno in _OTHERS else None
