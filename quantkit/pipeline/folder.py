"""The artifact folder: absent, unchanged or complete, even if a run is killed.

Files are written into a hidden folder beside the output, which is renamed at the end. A file lock keeps two
runs from one output; the operating system releases it whenever the process ends. The next run removes the
files of a killed one.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from quantkit.errors import InputError
from quantkit.runtime.manifest import MANIFEST

LOCKS: Any = importlib.import_module("fcntl") if os.name == "posix" else None
HELD: dict[Path, IO[str]] = {}  # claimed folder -> open lock file
NOT_WRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG)


@contextlib.contextmanager
def new_artifact(output: Path, *, force: bool) -> Iterator[Path]:
    """A temporary folder that becomes `output` if the block ends without an error."""
    output = output.absolute()
    partial = output.parent / f".{output.name}.partial"
    replaced = output.parent / f".{output.name}.replaced"
    lock_path = output.parent / f".{output.name}.lock"
    try:
        require_replaceable(output, force=force)
        output.parent.mkdir(parents=True, exist_ok=True)
        lock = lock_path.open("w", encoding="utf-8")
    except OSError as error:
        raise cannot_write(output, error) from error
    try:
        _lock(lock, output)
        try:
            _recover(output, replaced)
            # Checked again: another run or the recovery may have written an artifact since.
            require_replaceable(output, force=force)
            for leftover in (partial, replaced):
                shutil.rmtree(leftover, ignore_errors=True)
            partial.mkdir()
            yield partial
            if output.exists():
                output.rename(replaced)
            partial.rename(output)
            shutil.rmtree(replaced, ignore_errors=True)
        except OSError as error:
            if error.errno in NOT_WRITABLE:
                raise cannot_write(output, error) from error
            raise
        finally:
            _recover(output, replaced)
            shutil.rmtree(partial, ignore_errors=True)
            lock_path.unlink(missing_ok=True)
    finally:
        lock.close()


def claim(folder: Path, *, locks: Path) -> Path:
    """`folder`, locked until this process ends; while another process holds the lock, a folder beside it."""
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
    """Restore the old artifact after a run that was killed between its two renames."""
    if replaced.exists() and not output.exists():
        replaced.rename(output)


def require_replaceable(output: Path, *, force: bool, kind: str = "folder") -> None:
    """Raise unless the output, a folder or a zip, is absent, or `force` is set and quantkit wrote it."""
    if not output.exists():
        return
    if output.is_dir() != (kind == "folder"):
        obstacle = "folder" if output.is_dir() else "file"
        raise InputError(
            f"a {obstacle} is in the way", where=str(output), next_step=f"choose another {kind} with -o"
        )
    if output.is_dir() and not any(output.iterdir()):
        return
    if not force:
        raise InputError(
            f"the {kind} exists",
            where=str(output),
            next_step="pass --force to replace it, or choose another with -o",
        )
    if not _has_manifest(output):
        raise InputError(
            f"--force only replaces a {kind} that quantkit wrote, and this one has no manifest.json",
            where=str(output),
            next_step=f"choose another {kind} with -o, or remove this one yourself",
        )


def _has_manifest(output: Path) -> bool:
    if output.is_dir():
        return (output / MANIFEST).exists()
    try:
        with zipfile.ZipFile(output) as archive:
            return any(name.endswith(f"/{MANIFEST}") for name in archive.namelist())
    except zipfile.BadZipFile:
        return False


def _lock(lock: IO[str], output: Path) -> None:
    if LOCKS is None:
        return
    try:
        LOCKS.flock(lock, LOCKS.LOCK_EX | LOCKS.LOCK_NB)
        # Another run may have removed the locked file at its end.
        if Path(lock.name).stat().st_ino != os.fstat(lock.fileno()).st_ino:
            raise FileNotFoundError(lock.name)
    except OSError as error:
        raise InputError(
            "another run writes this folder",
            where=str(output),
            next_step="wait for it to end, or choose another folder with -o",
        ) from error


def cannot_write(output: Path, error: OSError) -> InputError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        free = shutil.disk_usage(next(p for p in output.parents if p.exists())).free
        return InputError(
            f"the disk is full ({free / 1e6:.0f} MB are left)",
            where=str(output),
            next_step="free some space, or choose an output on another disk with -o; nothing was kept",
        )
    return InputError(
        f"cannot be written ({os.strerror(error.errno or 0)})",
        where=str(output),
        next_step="choose a place that you may write to with -o; nothing was kept",
    )


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
