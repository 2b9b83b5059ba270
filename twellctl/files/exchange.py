"""Two paths change places in one call, where the system can: Linux, on most file systems."""

import ctypes
import errno
import os
from pathlib import Path

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_CANNOT = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP}


def exchange(one: Path, other: Path) -> bool:
    """Let `one` and `other` change places; at no moment is one of the two names missing.

    False if the system or the file system cannot do so: then nothing has changed. `OSError` for
    all else, such as a path that does not exist.
    """
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    paths = (_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other))
    if renameat2(*paths, _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _CANNOT:
        return False
    raise OSError(code, os.strerror(code), str(one), None, str(other))
