"""The artifact folder is absent, the old one, or complete, whatever happens to the run that writes it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import zipfile
from pathlib import Path

import pytest

from quantkit.errors import InputError
from quantkit.pipeline.folder import claim, file_inside, folder_bytes, new_artifact, require_apart
from quantkit.runtime.manifest import MANIFEST, hash_files

pytestmark = pytest.mark.once
SCRIPT = """
import os, resource, sys, time
from pathlib import Path
from quantkit.pipeline.folder import new_artifact
from quantkit.errors import InputError
output, force = Path(sys.argv[1]), sys.argv[2] == "force"
try:
{body}
except InputError as error:
    print(error, flush=True)
    sys.exit(2)
"""


def make(output, text="new", *, force=False):
    with new_artifact(output, force=force) as folder:
        (folder / "model.onnx").write_text(text)
        (folder / "sub").mkdir()
        (folder / "sub" / "part").write_text(text)
        write_manifest(folder)


def write_manifest(folder):
    (folder / MANIFEST).write_text(json.dumps({"files": hash_files(folder)}))


def is_whole(output, text):
    parts = (output / "model.onnx", output / "sub" / "part")
    return (output / MANIFEST).exists() and all(part.read_text() == text for part in parts)


def traces(parent):
    return sorted(path.name for path in parent.iterdir())


def refused(output, *, force=False):
    with pytest.raises(InputError) as caught:
        make(output, force=force)
    message = str(caught.value)
    assert "\n" not in message
    assert str(output) in message
    return message


def script(body):
    return SCRIPT.format(body=textwrap.indent(textwrap.dedent(body), "    "))


def child(body, output, force=""):
    """Another process that writes an artifact; `body` is what it does."""
    command = [sys.executable, "-c", script(body), str(output), force]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


STOPS_HALFWAY = """
    with new_artifact(output, force=force) as folder:
        (folder / "model.onnx").write_text("half")
        print("halfway", flush=True)
        time.sleep(60)
"""


@pytest.fixture
def halfway(tmp_path):
    """Starts a run that stops halfway, and kills it at the end of the test if that is still to be done."""
    running = []

    def start(output, force=""):
        process = child(STOPS_HALFWAY, output, force)
        running.append(process)
        assert process.stdout.readline() == "halfway\n", process.stderr.read()
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()


def test_a_run_leaves_its_artifact_and_nothing_else(tmp_path):
    output = tmp_path / "deep" / "er" / "out"
    make(output)
    assert is_whole(output, "new")
    assert traces(output.parent) == ["out"]


def test_nothing_shows_before_the_end(tmp_path):
    with new_artifact(tmp_path / "out", force=False) as folder:
        assert not (tmp_path / "out").exists()
        assert folder.parent == tmp_path, "on the same disk, so that renaming is one step"
        (folder / MANIFEST).write_text("{}")
    assert (tmp_path / "out" / MANIFEST).exists()


@pytest.mark.parametrize(
    "error", [ValueError("ours"), InputError("theirs"), KeyboardInterrupt(), OSError(5, "disk")]
)
def test_an_exception_leaves_no_trace(error, tmp_path):
    with pytest.raises(type(error)), new_artifact(tmp_path / "out", force=False) as folder:
        (folder / "model.onnx").write_text("half")
        raise error
    assert traces(tmp_path) == []


def test_an_exception_leaves_the_old_artifact(tmp_path):
    make(tmp_path / "out", "old")
    with pytest.raises(RuntimeError), new_artifact(tmp_path / "out", force=True) as folder:
        (folder / "model.onnx").write_text("half")
        raise RuntimeError
    assert is_whole(tmp_path / "out", "old")
    assert traces(tmp_path) == ["out"]


def test_force_replaces_all_of_the_old_one(tmp_path):
    make(tmp_path / "out", "old")
    (tmp_path / "out" / "stale").write_text("of the old run")
    write_manifest(tmp_path / "out")
    make(tmp_path / "out", force=True)
    assert is_whole(tmp_path / "out", "new")
    assert not (tmp_path / "out" / "stale").exists()
    assert traces(tmp_path) == ["out"]


@pytest.mark.parametrize("name", ["notes.txt", "sub/notes.txt", "link", "sub/pipe"])
def test_force_spares_a_file_that_the_manifest_does_not_list(name, tmp_path):
    make(tmp_path / "out", "old")
    path = tmp_path / "out" / name
    {"link": lambda: path.symlink_to(tmp_path), "pipe": lambda: os.mkfifo(path)}.get(
        path.name, lambda: path.write_text("mine")
    )()
    assert name in refused(tmp_path / "out", force=True)
    assert os.path.lexists(path)
    assert is_whole(tmp_path / "out", "old")


@pytest.mark.parametrize(
    "manifest",
    ["{}", "[]", "no JSON", '{"files": ["thesis.txt"]}', '{"files": {"thesis.txt": 1}}', "[" * 9999],
)
def test_force_spares_a_folder_whose_manifest_is_of_another_program(manifest, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / MANIFEST).write_text(manifest)
    (tmp_path / "out" / "thesis.txt").write_text("three years")
    assert MANIFEST in refused(tmp_path / "out", force=True)
    assert (tmp_path / "out" / "thesis.txt").read_text() == "three years"


def test_a_file_that_comes_while_a_run_writes_is_kept(tmp_path):
    make(tmp_path / "out", "old")
    with new_artifact(tmp_path / "out", force=True) as folder:
        (tmp_path / "out" / "notes.txt").write_text("mine")
        write_manifest(folder)
    (kept,) = tmp_path.glob("out.old-*/notes.txt")
    assert kept.read_text() == "mine"
    assert traces(tmp_path / "out") == [MANIFEST]


def test_force_replaces_a_zip_of_its_own_alone(tmp_path):
    output = tmp_path / "out.zip"
    for extra in ({}, {"out/notes.txt": "mine"}, {"notes.txt": "mine"}):
        with zipfile.ZipFile(output, "w") as archive:
            for name, text in {"out/a": "a", f"out/{MANIFEST}": '{"files": {"a": "0"}}', **extra}.items():
                archive.writestr(name, text)
        if extra:
            with pytest.raises(InputError, match=r"notes\.txt"), new_artifact(output, force=True, kind="zip"):
                pass
        else:
            with new_artifact(output, force=True, kind="zip") as partial:
                partial.write_text("new")
            assert output.read_text() == "new"
    assert traces(tmp_path) == ["out.zip"]


@pytest.mark.parametrize("kind", ["folder", "zip"])
@pytest.mark.parametrize("entry", ["link", "dangling link", "pipe", "device"])
def test_an_output_that_is_no_folder_and_no_file(entry, kind, tmp_path):
    make(tmp_path / "elsewhere", "old")
    output = tmp_path / "out"
    if entry == "pipe":
        os.mkfifo(output)
    elif entry == "device":
        output = Path(os.devnull)
    else:
        output.symlink_to(tmp_path / ("elsewhere" if entry == "link" else "nowhere"))
    before = traces(tmp_path)
    for force in (False, True):
        with pytest.raises(InputError, match=f"a {entry.split()[-1]} is in the way"):  # noqa: SIM117
            with new_artifact(output, force=force, kind=kind):
                pytest.fail("the work began")
    assert traces(tmp_path) == before
    assert is_whole(tmp_path / "elsewhere", "old")


@pytest.mark.parametrize("content", ["link", "dangling link", "text", "pipe"])
def test_a_lock_file_that_is_not_ours_is_left_alone(content, tmp_path):
    lock = tmp_path / ".out.lock"
    (tmp_path / "diary").write_text("mine")
    if content == "text":
        lock.write_text("mine")
    elif content == "pipe":
        os.mkfifo(lock)
    else:
        lock.symlink_to(tmp_path / ("diary" if content == "link" else "nowhere"))
    before = traces(tmp_path)
    with pytest.raises(InputError, match="not a lock"):
        make(tmp_path / "out")
    assert traces(tmp_path) == before
    assert (tmp_path / "diary").read_text() == "mine"


def test_links_in_place_of_the_leftovers_of_a_run_are_not_followed(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("three years")
    for end in ("partial", "replaced"):
        (tmp_path / f".out.{end}").symlink_to(tmp_path / "home")
    make(tmp_path / "out")
    assert is_whole(tmp_path / "out", "new")
    assert traces(tmp_path / "home") == ["thesis.txt"]
    assert traces(tmp_path) == ["home", "out"]


@pytest.mark.parametrize(
    ("output", "given"),
    [("in", "in"), ("in/out", "in"), ("out", "out/in"), ("link/out", "in"), ("out", "late/in")],
)
def test_an_output_and_an_input_lie_apart(output, given, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "out" / "in").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "in")
    (tmp_path / "late").symlink_to(tmp_path / "out")
    require_apart(tmp_path / "other", {"the model": str(tmp_path / given)})
    require_apart(tmp_path / output, {"the model": "gpt2", "the text": None})
    with pytest.raises(InputError, match="or replace it"):
        require_apart(tmp_path / output, {"the model": str(tmp_path / given)})


def test_a_folder_that_will_be_made_in_the_output(tmp_path):
    with pytest.raises(InputError, match="statistics"):
        require_apart(tmp_path / "out", {"--statistics": tmp_path / "out" / "statistics"})


@pytest.mark.parametrize(
    ("name", "is_inside"),
    [
        ("model.onnx", True),
        ("sub/part", True),
        ("inner", True),
        ("LICENSE/../../../x", False),
        ("LICENSE/../model.onnx", False),
        ("sub/./part", False),
        ("sub//part", False),
        ("/etc/passwd", False),
        ("..", False),
        ("", False),
        ("a\\b", False),
        ("c:x", False),
        ("a\nb", False),
        ("outer", False),
        ("folder/x", False),
        ("loop", False),
    ],
)
def test_names_of_a_manifest_stay_in_the_folder(name, is_inside, tmp_path):
    make(tmp_path / "out")
    (tmp_path / "x").write_text("mine")
    for link, goal in {"inner": "model.onnx", "outer": "../x", "folder": "..", "loop": "loop"}.items():
        (tmp_path / "out" / link).symlink_to(goal)
    path = file_inside(tmp_path / "out", name)
    assert (path is not None and path.is_file()) == is_inside


def test_without_force_nothing_is_replaced(tmp_path):
    make(tmp_path / "out", "old")
    assert "--force" in refused(tmp_path / "out")
    assert is_whole(tmp_path / "out", "old")
    assert traces(tmp_path) == ["out"]


def test_force_spares_what_quantkit_did_not_write(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("three years")
    assert MANIFEST in refused(tmp_path / "home", force=True)
    assert (tmp_path / "home" / "thesis.txt").read_text() == "three years"
    assert traces(tmp_path) == ["home"]


@pytest.mark.parametrize("force", [False, True])
def test_a_file_in_the_way(force, tmp_path):
    (tmp_path / "out").write_text("mine")
    assert "a file is in the way" in refused(tmp_path / "out", force=force)
    assert (tmp_path / "out").read_text() == "mine"


def test_an_empty_folder_may_be_filled(tmp_path):
    (tmp_path / "out").mkdir()
    make(tmp_path / "out")
    assert is_whole(tmp_path / "out", "new")
    assert traces(tmp_path) == ["out"]


@pytest.mark.parametrize("has_old", [False, True])
def test_a_killed_run_leaves_the_old_one_and_the_next_cleans_up(has_old, halfway, tmp_path):
    output = tmp_path / "out"
    if has_old:
        make(output, "old")
    process = halfway(output, "force")
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert output.exists() == has_old
    assert len(traces(tmp_path)) > has_old, "the kill came in the middle"
    if has_old:
        assert is_whole(output, "old")
    make(output, force=True)
    assert is_whole(output, "new")
    assert traces(tmp_path) == ["out"]


def test_two_runs_at_once(halfway, tmp_path):
    output = tmp_path / "out"
    process = halfway(output)
    before = traces(tmp_path)
    for force in (False, True):
        assert "another run" in refused(output, force=force)
    assert traces(tmp_path) == before, "the first run's files are left alone"
    assert (tmp_path / ".out.partial" / "model.onnx").read_text() == "half"
    make(tmp_path / "other")
    assert is_whole(tmp_path / "other", "new"), "another folder is free"
    assert process.poll() is None


def test_a_run_that_comes_too_late_does_not_replace_the_one_before(tmp_path, monkeypatch):
    """The folder was free when it looked, and not any more when it held the lock."""
    output = tmp_path / "out"
    from quantkit.pipeline import folder

    lock = folder._lock
    monkeypatch.setattr(folder, "_lock", lambda *each: (lock(*each), output.mkdir(), write_manifest(output)))
    refused(output)
    assert traces(tmp_path) == ["out"]
    assert traces(output) == [MANIFEST]


def killed_between_the_renames(tmp_path):
    make(tmp_path / "out", "old")
    (tmp_path / "out").rename(tmp_path / ".out.replaced")
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / MANIFEST).write_text("{}")
    (tmp_path / ".out.lock").touch()


def test_a_run_killed_between_the_renames_is_recovered(tmp_path):
    killed_between_the_renames(tmp_path)
    with pytest.raises(RuntimeError), new_artifact(tmp_path / "out", force=True):
        assert is_whole(tmp_path / "out", "old")
        raise RuntimeError
    assert is_whole(tmp_path / "out", "old")
    assert traces(tmp_path) == ["out"]


def test_a_recovered_artifact_is_not_replaced_without_force(tmp_path):
    killed_between_the_renames(tmp_path)
    assert "--force" in refused(tmp_path / "out")
    assert is_whole(tmp_path / "out", "old")
    assert traces(tmp_path) == ["out"]


def test_a_leftover_of_a_finished_replacement_is_removed(tmp_path):
    make(tmp_path / "out", "new")
    (tmp_path / ".out.replaced").mkdir()
    (tmp_path / ".out.replaced" / "old").touch()
    make(tmp_path / "out", "newer", force=True)
    assert is_whole(tmp_path / "out", "newer")
    assert traces(tmp_path) == ["out"]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
def test_a_place_that_takes_no_folders():
    assert "cannot be written" in refused(Path("/proc/quantkit-out"))


def test_a_parent_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("mine")
    assert "cannot be written" in refused(tmp_path / "file" / "out")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
@pytest.mark.parametrize("mode", [0o555, 0o000])
@pytest.mark.parametrize("has_old", [False, True])
def test_a_folder_that_may_not_be_written(mode, has_old):
    """Root may write anywhere, so a child gives that up first."""
    body = """
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    with new_artifact(output, force=force) as folder:
        print("written", flush=True)
    """
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are closed to other users
        locked = Path(folder)
        if has_old:
            make(locked / "out", "old")
        locked.chmod(mode)
        try:
            printed, errors = child(body, locked / "out", "force").communicate(timeout=30)
        finally:
            locked.chmod(0o755)
        assert "cannot be written (Permission denied)" in printed, errors
        assert printed.count("\n") == 1
        assert errors == ""
        assert traces(locked) == (["out"] if has_old else [])


@pytest.mark.skipif(os.name != "posix", reason="limits of POSIX")
@pytest.mark.parametrize("has_old", [False, True])
def test_a_full_disk(has_old, tmp_path):
    """A limit on the size of files stops a write as a full disk does, in the middle."""
    body = """
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    with new_artifact(output, force=force) as folder:
        (folder / "model.onnx").write_bytes(bytes(99_000))
        (folder / "weights").write_bytes(bytes(200_000))
    """
    if has_old:
        make(tmp_path / "out", "old")
    process = child(body, tmp_path / "out", "force")
    printed, errors = process.communicate(timeout=30)
    assert "the disk is full" in printed, errors
    assert printed.count("\n") == 1
    assert errors == ""
    assert process.returncode == 2
    assert traces(tmp_path) == (["out"] if has_old else [])
    if has_old:
        assert is_whole(tmp_path / "out", "old")


def test_hashes_are_of_all_files_but_the_manifest(tmp_path):
    make(tmp_path / "out", "abc")
    sha256_of_abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-4
    assert hash_files(tmp_path / "out") == {"model.onnx": sha256_of_abc, "sub/part": sha256_of_abc}
    assert folder_bytes(tmp_path / "out") == 3 + 3 + (tmp_path / "out" / MANIFEST).stat().st_size
    (tmp_path / "out" / "sub" / MANIFEST).write_text("abc")
    assert hash_files(tmp_path / "out")[f"sub/{MANIFEST}"] == sha256_of_abc


def test_a_folder_serves_one_process_at_a_time_and_is_free_once_that_is_killed(tmp_path):
    folder = tmp_path / "statistics"
    code = """
        import sys, time
        from pathlib import Path
        from quantkit.pipeline.folder import claim
        folder = Path(sys.argv[1])
        print(claim(folder, locks=folder.parent / "locks").name, flush=True)
        time.sleep(60)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(folder)]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True)]
    try:
        assert runs[0].stdout.readline().strip() == "statistics"
        runs.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert runs[1].stdout.readline().strip() == f"statistics-{runs[1].pid}"
        runs[0].kill()
        runs[0].wait()
        (tmp_path / f"statistics-{runs[1].pid}").mkdir()
        (tmp_path / "statistics-1").mkdir()  # of a killed run
        for _ in range(2):  # again: this process has it
            assert claim(folder, locks=tmp_path / "locks") == folder
        assert traces(tmp_path) == ["locks", f"statistics-{runs[1].pid}"]
    finally:
        for run in runs:
            run.kill()
            run.wait()
