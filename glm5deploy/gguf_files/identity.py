"""Which files a merge was made of: size, inode and mtime of each, kept as an attribute of the merged file itself.

Dates alone do not tell: a shard that was linked, moved or copied with its date into place of another is older than a
merge that never saw it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

_ATTRIBUTE = "user.glm5deploy.sources"
_NOT_OFFERED = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM, errno.ENOSPC, errno.ERANGE}

Identity = list[int]


def identity_of(path: Path) -> Identity:
    """Size in bytes, inode, mtime in ns."""
    found = path.stat()
    return [found.st_size, found.st_ino, found.st_mtime_ns]


def mark_sources(descriptor: int, identities: Sequence[Identity]) -> None:
    """Note on the open merged file what it was made of; nothing where the file system keeps no such attributes."""
    try:
        os.setxattr(descriptor, _ATTRIBUTE, _digest(identities))
    except OSError as error:
        if error.errno not in _NOT_OFFERED:
            raise


def is_made_of(output: Path, sources: Sequence[Path]) -> bool:
    """Whether ``output`` was merged from these very files, as they are now.

    Without the attribute their dates decide, that of the last change of the inode included: no program can set it back.
    """
    if not all(path.exists() for path in (output, *sources)):
        return False
    try:
        return os.getxattr(output, _ATTRIBUTE) == _digest([identity_of(path) for path in sources])
    except OSError as error:
        if error.errno not in _NOT_OFFERED | {errno.ENODATA}:
            raise
    stats = [path.stat() for path in sources]
    newest = max((max(stat.st_mtime_ns, stat.st_ctime_ns) for stat in stats), default=0)
    return output.stat().st_mtime_ns >= newest


def _digest(identities: Sequence[Identity]) -> bytes:
    return hashlib.sha256(json.dumps([list(identity) for identity in identities]).encode()).hexdigest().encode()
