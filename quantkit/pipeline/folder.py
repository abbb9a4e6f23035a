"""The artifact folder: absent, the old one, or complete, whenever a run is killed.

Everything is written into a hidden folder beside the output and renamed at the end. A lock held by the
running process, which the system lets go of however the process ends, keeps two runs from one output; what
a killed run left behind is removed by the next.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from quantkit.errors import InputError

MANIFEST = "manifest.json"
LOCKS: Any = importlib.import_module("fcntl") if os.name == "posix" else None
HELD: dict[Path, IO[str]] = {}  # open locks of folders that this process works in


@contextlib.contextmanager
def new_artifact(output: Path, *, force: bool) -> Iterator[Path]:
    """A folder to write into, which becomes `output` when the block ends without an error."""
    output = output.absolute()
    partial = output.parent / f".{output.name}.partial"
    replaced = output.parent / f".{output.name}.replaced"
    lock_path = output.parent / f".{output.name}.lock"
    try:
        _check_output(output, force=force)
        output.parent.mkdir(parents=True, exist_ok=True)
        lock = lock_path.open("w", encoding="utf-8")
    except OSError as error:
        raise _cannot_write(output, error) from error
    try:
        _lock(lock, output)
        try:
            _recover(output, replaced)
            # Again: a run that ended since, or the recovery, may have put an artifact there.
            _check_output(output, force=force)
            for leftover in (partial, replaced):
                shutil.rmtree(leftover, ignore_errors=True)
            partial.mkdir()
            yield partial
            if output.exists():
                output.rename(replaced)
            partial.rename(output)
            shutil.rmtree(replaced, ignore_errors=True)
        except OSError as error:
            if error.errno in (
                errno.ENOSPC,
                errno.EDQUOT,
                errno.EROFS,
                errno.EACCES,
                errno.EPERM,
                errno.EFBIG,
            ):
                raise _cannot_write(output, error) from error
            raise
        finally:
            _recover(output, replaced)
            shutil.rmtree(partial, ignore_errors=True)
            lock_path.unlink(missing_ok=True)
    finally:
        lock.close()


def claim(folder: Path, *, locks: Path) -> Path:
    """`folder` until this process ends; one of its own beside it while another process has that."""
    if LOCKS is None or folder in HELD:
        return folder
    locks.mkdir(parents=True, exist_ok=True)
    handle = (locks / f"{folder.name}.lock").open("w", encoding="utf-8")
    try:
        LOCKS.flock(handle, LOCKS.LOCK_EX | LOCKS.LOCK_NB)
    except OSError:
        handle.close()
        return folder.with_name(f"{folder.name}-{os.getpid()}")
    HELD[folder] = handle
    return folder


def _recover(output: Path, replaced: Path) -> None:
    """Put the old artifact back where a run was killed between the two renames."""
    if replaced.exists() and not output.exists():
        replaced.rename(output)


def _check_output(output: Path, *, force: bool) -> None:
    if not output.exists():
        return
    if not output.is_dir():
        raise InputError("a file is in the way", where=str(output), next_step="choose another folder with -o")
    if not any(output.iterdir()):
        return
    if not force:
        raise InputError(
            "the folder exists",
            where=str(output),
            next_step="pass --force to replace it, or choose another with -o",
        )
    if not (output / MANIFEST).exists():
        raise InputError(
            "--force only replaces a folder that quantkit wrote, and this one has no manifest.json",
            where=str(output),
            next_step="choose another folder with -o, or remove this one yourself",
        )


def _lock(lock: IO[str], output: Path) -> None:
    if LOCKS is None:
        return
    try:
        LOCKS.flock(lock, LOCKS.LOCK_EX | LOCKS.LOCK_NB)
        # A run that just ended may have removed the file that this lock is on.
        if Path(lock.name).stat().st_ino != os.fstat(lock.fileno()).st_ino:
            raise FileNotFoundError(lock.name)
    except OSError as error:
        raise InputError(
            "another run is writing this folder",
            where=str(output),
            next_step="wait for it to end, or choose another folder with -o",
        ) from error


def _cannot_write(output: Path, error: OSError) -> InputError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        free = shutil.disk_usage(next(p for p in output.parents if p.exists())).free
        return InputError(
            f"the disk is full ({free / 1e6:.0f} MB are left)",
            where=str(output),
            next_step="free some space, or choose a folder on another disk with -o; nothing was kept",
        )
    return InputError(
        f"cannot be written ({os.strerror(error.errno or 0)})",
        where=str(output),
        next_step="choose a folder that you may write to with -o",
    )


def hash_files(folder: Path) -> dict[str, str]:
    """SHA-256 of every file, by its path in the folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != MANIFEST:
            with path.open("rb") as file:
                found[str(path.relative_to(folder))] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def folder_bytes(folder: Path) -> int:
    """Bytes of every file of the folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
