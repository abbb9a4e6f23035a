"""Places that are written to: errors of a disk by place, temporary folders, locks.

A temporary folder is locked as long as its process lives, whatever ends the process, so that a later run can
tell the folders of killed runs and remove them.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quantkit.errors import InputError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NOT_WRITABLE = (*FULL, errno.EROFS, errno.EACCES, errno.EPERM)
RUST_ERROR = re.compile(r"\(os error (\d+)\)")  # of safetensors and tokenizers
TEMPORARY = "quantkit-temporary-"
OTHER_TEMPORARY = "free some space, or name another temporary folder in the variable TMPDIR"
OTHER_CACHE = "free some space, or name another cache folder in the variable QUANTKIT_CACHE"
LOCKS: Any = importlib.import_module("fcntl") if os.name == "posix" else None


@contextlib.contextmanager
def writing(place: Path, *, next_step: str) -> Iterator[None]:
    """Turn a full or closed disk into an `InputError` about the place."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        number = _error_number(error)
        if number not in NOT_WRITABLE or not _concerns(error, place):
            raise
        raise cannot_write(place, number, next_step) from error


def _error_number(error: Exception) -> int | None:
    """The operating system's number of a failed write, also where a library wraps it in a text."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    if " requested and " in str(error):  # numpy's, of a short write
        return errno.ENOSPC
    found = RUST_ERROR.search(str(error))
    return int(found[1]) if found else None


def _concerns(error: Exception, place: Path) -> bool:
    """Whether the error names no path, or one that lies at the place."""
    name = getattr(error, "filename", None)
    return not isinstance(name, str) or place.absolute().parent in Path(name).absolute().parents


def cannot_write(place: Path, number: int | None, next_step: str) -> InputError:
    reason = f"cannot be written ({os.strerror(number or 0)})"
    if number in FULL:
        free = shutil.disk_usage(next(path for path in (place, *place.parents) if path.exists())).free
        reason = f"the disk is full ({free / 1e6:.0f} MB are left)"
    return InputError(reason, where=str(place), next_step=next_step)


def require_free(folder: Path, num_bytes: int, *, what: str, next_step: str) -> None:
    """Refuse a disk that is too small for what will be written; the folder need not exist."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if num_bytes > free:
        raise InputError(
            f"{what} needs {num_bytes / 1e6:,.0f} MB there, and {free / 1e6:,.0f} MB are free",
            where=str(folder),
            next_step=next_step,
        )


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder for the time of the block; those of killed runs are removed first."""
    try:
        parent = Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        raise InputError("no temporary folder can be written", next_step=OTHER_TEMPORARY) from error
    with writing(parent, next_step=OTHER_TEMPORARY):
        _remove_stale(parent)
        folder, lock = _locked_folder(parent)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            if lock is not None:
                os.close(lock)


def _locked_folder(parent: Path) -> tuple[Path, int | None]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=parent))
        if LOCKS is None:
            return folder, None
        with contextlib.suppress(FileNotFoundError):  # another run found it before it was locked
            lock = os.open(folder, os.O_RDONLY)
            LOCKS.flock(lock, LOCKS.LOCK_EX)
            if os.fstat(lock).st_nlink:
                return folder, lock
            os.close(lock)


@functools.cache
def _remove_stale(parent: Path) -> None:
    """Remove the temporary folders of this user whose process has ended."""
    if LOCKS is None:
        return
    for folder in parent.glob(f"{TEMPORARY}*"):
        with contextlib.suppress(OSError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.getuid():
                    LOCKS.flock(lock, LOCKS.LOCK_EX | LOCKS.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def open_lock(path: Path) -> int:
    """A descriptor of a lock file, which is empty; a link and a file of another content are refused."""
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    not_ours = InputError(
        "not a lock of quantkit", where=str(path), next_step="move this file, or choose another output"
    )
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if path.is_symlink():
            raise not_ours from error
        raise
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_size:
        os.close(descriptor)
        raise not_ours
    return descriptor
