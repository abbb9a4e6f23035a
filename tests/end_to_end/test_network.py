"""Nothing looks up a host: a recorder stands before the resolver of the C library, in every process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

GCC = shutil.which("gcc")
ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(sys.platform != "linux" or GCC is None, reason="a recorder needs Linux and gcc"),
]
RECORDER = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
static void note(const char *name) {
  FILE *file = fopen(getenv("LOOKUPS"), "a");
  if (file) { fprintf(file, "%s\\n", name ? name : "-"); fclose(file); }
}
int getaddrinfo(const char *name, const char *port, const struct addrinfo *hints, struct addrinfo **found) {
  note(name);
  return EAI_AGAIN;
}
struct hostent *gethostbyname(const char *name) { note(name); return 0; }
int connect(int descriptor, const struct sockaddr *address, socklen_t length) {
  int (*real)(int, const struct sockaddr *, socklen_t) = dlsym(RTLD_NEXT, "connect");
  if (address->sa_family == AF_INET || address->sa_family == AF_INET6) note("an address");
  return real(descriptor, address, length);
}
"""
SWITCHES = (
    "ORT_DISABLE_TELEMETRY",
    "HF_HUB_DISABLE_TELEMETRY",
    "HF_HUB_OFFLINE",
    "XDG_CACHE_HOME",
    "QUANTKIT_CACHE",
)
API = """
import sys, quantkit
artifact = quantkit.quantize("demo", output=sys.argv[1], accuracy=False, latency=False)
print(artifact.generate("The king", max_new_tokens=2))
"""
WITHOUT_QUANTKIT = (
    "import onnxruntime, sys, time; onnxruntime.InferenceSession(sys.argv[1]); time.sleep({seconds})"
)
WITH_QUANTKIT = f"import quantkit; {WITHOUT_QUANTKIT}"
WAIT = 20.0  # the first upload of onnxruntime 1.31 comes after ten seconds


@pytest.fixture(scope="module")
def recorder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorder")
    (folder / "recorder.c").write_text(RECORDER)
    library = folder / "recorder.so"
    subprocess.run([str(GCC), "-shared", "-fPIC", "-o", library, folder / "recorder.c", "-ldl"], check=True)
    return library


@pytest.fixture
def run(recorder, tmp_path):
    """(names that a process and its children look up, whether onnxruntime keeps a device id or events)"""

    def start(*command, cwd=None):
        environment = {key: value for key, value in os.environ.items() if key not in SWITCHES}
        environment |= {
            "LD_PRELOAD": str(recorder),
            "LOOKUPS": str(tmp_path / "lookups"),
            "HOME": str(tmp_path),
        }
        subprocess.run(
            [sys.executable, *map(str, command)], env=environment, cwd=cwd, check=True, timeout=300
        )
        lookups = tmp_path / "lookups"
        names = set(lookups.read_text().split("\n")) - {""} if lookups.exists() else set()
        return names, any(path.name == ".onnxruntime" for path in tmp_path.rglob("*"))

    return start


def test_a_look_up_is_seen(run):
    code = (
        "import contextlib, socket\nwith contextlib.suppress(OSError): socket.getaddrinfo('example.com', 80)"
    )
    assert run("-c", code) == ({"example.com"}, False)


@pytest.mark.slow
def test_no_verb_looks_up_a_host(run, tmp_path):
    artifact = tmp_path / "artifact"
    assert run("-m", "quantkit.cli", "quantize", "demo", "--no-eval", "-o", artifact) == (set(), False)
    assert run("-m", "quantkit.cli", "generate", artifact, "The king", "--max-new-tokens", 2) == (
        set(),
        False,
    )
    assert run("-m", "quantkit.cli", "package", artifact, "-o", tmp_path / "packed") == (set(), False)
    arguments = ("run.py", "The king", "--max-new-tokens", "2")
    assert run(*arguments, cwd=tmp_path / "packed") == (set(), False)


def test_the_api_and_its_processes_look_up_no_host(run, tmp_path):
    assert run("-c", API, tmp_path / "artifact") == (set(), False)


@pytest.mark.slow
@pytest.mark.parametrize("is_ours", [True, False])
def test_a_process_that_lives_for_long(is_ours, run, tmp_path):
    """onnxruntime alone shows that the recorder would see it."""
    shutil.copytree(ROOT / "quantkit" / "assets" / "demo", tmp_path / "model")
    run("-m", "quantkit.cli", "quantize", tmp_path / "model", "--no-eval", "-o", tmp_path / "artifact")
    code = (WITH_QUANTKIT if is_ours else WITHOUT_QUANTKIT).format(seconds=WAIT)
    names, keeps_events = run("-c", code, tmp_path / "artifact" / "model.onnx")
    if is_ours:
        assert (names, keeps_events) == (set(), False)
    elif not keeps_events:
        pytest.skip("this onnxruntime has no telemetry")
    else:
        assert names == {"mobile.events.data.microsoft.com"}
