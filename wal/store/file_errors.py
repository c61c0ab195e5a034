"""Classify errors of a file system for a writer (retry, refused or unknown), and state the remedy."""

from __future__ import annotations

import errno

from memwal.wal.errors import StoreRefused, StoreUnavailable

_TRY_AGAIN = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EIO,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.EAGAIN,
    errno.EBUSY,
    # Of file systems on a network or in another process:
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.EREMOTEIO,
    errno.ENOTCONN,
    errno.ECONNRESET,
    errno.ECONNABORTED,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.ENOLCK,
}
NOT_LINKED = {
    errno.EPERM,
    errno.EACCES,
    errno.EROFS,
    errno.EOPNOTSUPP,
    errno.ENOSYS,
    errno.EXDEV,
    errno.EMLINK,
    errno.ENAMETOOLONG,
    errno.ENOSPC,
    errno.EDQUOT,
}
"""Errors that show that a file system rejected link(2). After any other error the link may exist."""
_REMEDY = {
    errno.ENOSPC: "free space on this file system",
    errno.EDQUOT: "raise the disk quota or free space",
    errno.EROFS: "the file system is read-only: remount it writable, or give another path",
    errno.EACCES: "give this user read, write and search permission",
    errno.EPERM: "use a file system that has hard links, and a directory this user may write",
    errno.EOPNOTSUPP: "use a file system that has hard links",
    errno.ENOSYS: "use a file system that has hard links",
    errno.EEXIST: "a part of the path is a file: give a directory",
    errno.ENOTDIR: "a part of the path is a file: give a directory",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}


def failed(path: str, error: OSError) -> StoreUnavailable | StoreRefused:
    """Return the store's error for `error` at `path`: unavailable if a later attempt may succeed, else refused."""
    remedy = _REMEDY.get(error.errno or 0)
    message = f"{path}: {error.strerror or error}" + (f"; {remedy}" if remedy else "")
    return (StoreUnavailable if error.errno in _TRY_AGAIN else StoreRefused)(message)
