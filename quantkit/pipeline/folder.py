"""The artifact folder: absent, unchanged or complete, even if a run is killed.

Files are written into a hidden folder beside the output, which is renamed at the end. A file lock keeps two
runs from one output; the operating system releases it whenever the process ends. The next run removes the
files of a killed one.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from quantkit.errors import InputError
from quantkit.report.card import CARD_FILE
from quantkit.runtime.machine.disk import LOCKS, cannot_write, open_lock, writing
from quantkit.runtime.manifest import MANIFEST, is_plain, sha256_of

COMPILED = "compiled"  # folder of an artifact that `bench --provider` fills later
HELD: dict[Path, int] = {}  # claimed folder -> descriptor of its lock
NEXT_STEP = "free some space, or choose a place that you may write to with -o; nothing was kept"
SHOWN_FILES = 3
NOT_OURS = (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, zipfile.BadZipFile)
ENTRIES: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISLNK, "link"),
    (stat.S_ISDIR, "folder"),
    (stat.S_ISREG, "zip"),
    (stat.S_ISFIFO, "pipe"),
    (stat.S_ISSOCK, "socket"),
    (lambda mode: True, "device"),
)


@contextlib.contextmanager
def new_artifact(output: Path, *, force: bool, kind: str = "folder") -> Iterator[Path]:
    """A temporary path that becomes `output`, a folder or a zip, if the block ends without an error."""
    output = _real(output.parent) / output.name if output.name not in ("", "..") else _real(output)
    partial, replaced, lock_path = (
        output.with_name(f".{output.name}.{end}") for end in ("partial", "replaced", "lock")
    )
    try:
        require_replaceable(output, force=force, kind=kind)
        output.parent.mkdir(parents=True, exist_ok=True)
        lock = open_lock(lock_path)
    except OSError as error:
        raise cannot_write(output, error.errno, NEXT_STEP) from error
    try:
        _lock(lock, lock_path, output)
        try:
            with writing(output, next_step=NEXT_STEP):
                _recover(output, replaced)
                # Checked again: another run or the recovery may have written an artifact since.
                require_replaceable(output, force=force, kind=kind)
                _remove(partial)
                _remove(replaced)
                if kind == "folder":
                    partial.mkdir()
                yield partial
                if output.exists():
                    if unlisted_files(output):  # they came while this run was writing
                        replaced = output.with_name(f"{output.name}.old-{os.getpid()}")
                    output.rename(replaced)
                partial.rename(output)
        finally:
            _recover(output, replaced)
            _remove(partial)
            _remove(output.with_name(f".{output.name}.replaced"))
            lock_path.unlink(missing_ok=True)
    finally:
        os.close(lock)


def claim(folder: Path, *, locks: Path) -> Path:
    """`folder`, locked until this process ends; while another process holds the lock, a folder beside it.

    Folders beside it whose process has ended are removed.
    """
    if LOCKS is None or folder in HELD:
        return folder
    locks.mkdir(parents=True, exist_ok=True)
    if not _hold(folder, locks):
        beside = folder.with_name(f"{folder.name}-{os.getpid()}")
        _hold(beside, locks)
        return beside
    for beside in folder.parent.glob(f"{folder.name}-*"):
        if beside not in HELD and _hold(beside, locks):
            _remove(beside)
    return folder


def _hold(folder: Path, locks: Path) -> bool:
    """Lock a folder until this process ends, unless another process has it."""
    lock = open_lock(locks / f"{folder.name}.lock")
    try:
        LOCKS.flock(lock, LOCKS.LOCK_EX | LOCKS.LOCK_NB)
    except OSError:
        os.close(lock)
        return False
    HELD[folder] = lock
    return True


def _recover(output: Path, replaced: Path) -> None:
    """Restore the old artifact after a run that was killed between its two renames."""
    if replaced.exists() and not replaced.is_symlink() and not output.exists():
        replaced.rename(output)


def _remove(path: Path) -> None:
    """Remove a file, a link or a folder of a run; links in it are not followed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def require_replaceable(output: Path, *, force: bool, kind: str = "folder") -> None:
    """Raise unless the output is absent, or `force` is set and quantkit wrote all of it."""
    if not os.path.lexists(output):
        return
    mode = output.lstat().st_mode
    obstacle = next(name for is_kind, name in ENTRIES if is_kind(mode))
    if obstacle != kind:
        raise InputError(
            f"a {'file' if obstacle == 'zip' else obstacle} is in the way",
            where=str(output),
            next_step=f"choose another {kind} with -o",
        )
    if output.is_dir() and not any(output.iterdir()):
        return
    if not force:
        raise InputError(
            f"the {kind} exists",
            where=str(output),
            next_step="pass --force to replace it, or choose another with -o",
        )
    unlisted = unlisted_files(output)
    if unlisted is None:
        raise InputError(
            f"--force only replaces a {kind} that quantkit wrote, and no {MANIFEST} here lists its files",
            where=str(output),
            next_step=f"choose another {kind} with -o, or remove this one yourself",
        )
    if unlisted:
        more = f" and {len(unlisted) - SHOWN_FILES} more" if len(unlisted) > SHOWN_FILES else ""
        raise InputError(
            f"--force replaces files that {MANIFEST} lists, not {', '.join(unlisted[:SHOWN_FILES])}{more}",
            where=str(output),
            next_step=f"move what is yours, or choose another {kind} with -o",
        )


def require_apart(output: Path, inputs: Mapping[str, str | Path | None]) -> None:
    """Refuse an output inside of an input and around one; a text that is no path names a model."""
    place = _real(output.expanduser())
    for name, given in inputs.items():
        path = _real(Path(given or "").expanduser())
        is_path = isinstance(given, Path) or bool(given and path.exists())
        if is_path and (place.is_relative_to(path) or path.is_relative_to(place)):
            raise InputError(
                f"the output would lie in {name} ({given}), or replace it",
                where=str(output),
                next_step="choose another place with -o",
            )


def unlisted_files(output: Path) -> list[str] | None:
    """Files of an output that its manifest does not list; None without a manifest of quantkit."""
    try:
        if output.is_dir():
            names = list(_files_in(output))
            manifest = (output / MANIFEST).read_bytes()
        else:
            with zipfile.ZipFile(output) as archive:
                root = f"{archive.namelist()[0].partition('/')[0]}/"
                names = [name.removeprefix(root) for name in archive.namelist()]
                manifest = archive.read(f"{root}{MANIFEST}")
        document = json.loads(manifest)
        listed, card = document["files"], document.get("card")
        if not all(isinstance(name, str) and isinstance(value, str) for name, value in listed.items()):
            return None
    except NOT_OURS:
        return [] if output.is_dir() and not any(output.iterdir()) else None
    ours = {*listed, MANIFEST}
    if card and (output / CARD_FILE).is_file() and sha256_of(output / CARD_FILE) == card:
        ours.add(CARD_FILE)  # nobody has written in it
    return [name for name in names if name not in ours and not name.startswith(f"{COMPILED}/")]


def _files_in(folder: Path) -> Iterator[str]:
    """Names of everything below a folder but folders; a link counts as a file."""
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not path.is_dir():
            yield path.relative_to(folder).as_posix()


def file_inside(folder: Path, name: str) -> Path | None:
    """The file of a manifest's name, if it lies in the folder under that name, links followed."""
    path = folder / name
    return path if is_plain(name) and _real(path).is_relative_to(_real(folder)) else None


def _real(path: Path) -> Path:
    """The path with links followed; a loop of links, which `Path.resolve` raises on, ends it."""
    return Path(os.path.realpath(path))


def _lock(lock: int, path: Path, output: Path) -> None:
    if LOCKS is None:
        return
    try:
        LOCKS.flock(lock, LOCKS.LOCK_EX | LOCKS.LOCK_NB)
        # Another run may have removed the locked file at its end.
        if path.stat().st_ino != os.fstat(lock).st_ino:
            raise FileNotFoundError(path)
    except OSError as error:
        raise InputError(
            "another run writes this folder",
            where=str(output),
            next_step="wait for it to end, or choose another folder with -o",
        ) from error


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
