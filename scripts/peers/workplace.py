"""Where peers live: their environments, the models' random weights, the artifacts, and the processes' logs.

Everything is made once and kept, under a key of what made it (requirements, the peer's file, the weights'
file), so that a changed file is made again and an unchanged one costs nothing. Standard library only: the
process that measures others stays small, for a child's peak memory begins with its parent's.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers import timing
from peers.systems import BUILDS, ENVIRONMENTS, PROJECT, SHOWN_VERSIONS, SYSTEMS, UNWANTED

PEERS = Path(__file__).resolve().parent
TIME_LIMIT_S = 3600  # for one command: a peer that hangs is a peer that fails


class PeerError(Exception):
    """A command of a peer failed; the message is the reason that its row shows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """A process that ended well."""

    answer: dict[str, Any]
    seconds: float
    peak_bytes: int


def say(text: str) -> None:
    """Progress goes to stderr."""
    print(f"bench_peers: {text}", file=sys.stderr, flush=True)


def fingerprint(*parts: str) -> str:
    """A short key of what something was made by."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def start(command: list[str], log: Path, *, stdin: int | None = None) -> subprocess.Popen[str]:
    """A command of a peer, whose stderr goes to the log, under the command itself."""
    fixed = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUTF8": "1"}
    environment = {**os.environ, **fixed, "OMP_NUM_THREADS": str(timing.NUM_THREADS)}
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as errors:
        print("$", *command, file=errors, flush=True)
        try:
            return subprocess.Popen(
                command, stdin=stdin, stdout=subprocess.PIPE, stderr=errors, env=environment, text=True
            )
        except OSError as error:
            raise PeerError(f"{command[0]}: {error.strerror}") from error


@contextlib.contextmanager
def killed_in_time(process: subprocess.Popen[str]) -> Iterator[None]:
    """Nobody waits for a process longer than the limit."""
    clock = threading.Timer(TIME_LIMIT_S, process.kill)
    clock.start()
    try:
        yield
    finally:
        clock.cancel()


def failure(log: Path, lines: list[str], end: str) -> PeerError:
    """Why a command failed: the last it said in its log, or else in its output, and how it ended."""
    told = log.read_text(encoding="utf-8", errors="replace").splitlines()[1:] or lines
    reason = next((line.strip() for line in reversed(told) if line.strip()), "no message")
    return PeerError(f"{reason[:300]} ({end}; {log.parent.name}/{log.name} of the cache)")


def run(command: list[str], log: Path) -> Finished:
    """Run to the end; the last line of its log is the reason when it fails."""
    begin = time.perf_counter()
    process = start(command, log)
    assert process.stdout is not None
    with killed_in_time(process):
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - begin
    lines = output.strip().splitlines()
    if process.returncode:
        raise failure(log, lines, f"exit {process.returncode}")
    try:
        answer = json.loads(lines[-1]) if lines else {}
    except ValueError:
        answer = {}
    return Finished(
        answer=answer if isinstance(answer, dict) else {},
        seconds=seconds,
        peak_bytes=usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024),
    )


class Workplace:
    """The cache folder: environments, models, artifacts, logs."""

    def __init__(self, cache: Path) -> None:
        """Nothing is made yet."""
        self.cache = cache

    def python(self, environment: str) -> str:
        """The interpreter of an environment."""
        if environment == PROJECT:
            return sys.executable
        return str(self.cache / "environments" / environment / "bin" / "python")

    def log(self, name: str) -> Path:
        """Where a command's stderr goes."""
        return self.cache / "logs" / f"{name}.log"

    def set_up(self, environment: str) -> None:
        """Install once; a stamp, written last, tells a finished install from an interrupted one."""
        if environment == PROJECT:
            return
        folder, requirements = self.cache / "environments" / environment, ENVIRONMENTS[environment]
        stamp = folder / f".done-{fingerprint(*requirements)}"
        if stamp.exists():
            return
        say(f"installing {', '.join(requirements)}")
        if not Path(self.python(environment)).exists():
            venv.create(folder, with_pip=True)
        pip = [self.python(environment), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
        run([*pip, *requirements], self.log(f"install-{environment}"))
        if environment in UNWANTED:
            uninstall = [*pip[:3], "uninstall", "--yes", *UNWANTED[environment]]
            run(uninstall, self.log(f"uninstall-{environment}"))
        if environment in BUILDS:
            say(f"building {environment} (about 10 minutes)")
            script = str(PEERS / BUILDS[environment])
            run([self.python(environment), script, "build"], self.log(f"build-{environment}"))
        stamp.touch()

    def source(self, model: str) -> Path:
        """The random weights of a model, made once."""
        script = PEERS / "source_models.py"
        folder = self.folder(f"source-{fingerprint(script.read_text(encoding='utf-8'))}", model)
        if not (folder / "model.safetensors").exists():
            self.set_up("torch")
            say(f"making the random weights of {model}")
            beside = folder.with_name("source.part")
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir(parents=True)
            run(
                [self.python("torch"), str(PEERS / "source_models.py"), model, str(beside)],
                self.log(f"source-{model}"),
            )
            beside.rename(folder)
        return folder

    def folder(self, name: str, model: str) -> Path:
        """Where a system's artifact of a model lies."""
        return self.cache / "models" / model / name

    def make(self, name: str, model: str) -> dict[str, float]:
        """Make an artifact, replacing an older one; its cost."""
        system, folder = SYSTEMS[name], self.folder(name, model)
        source = self.folder(system.made_from, model) if system.made_from else self.source(model)
        shutil.rmtree(folder, ignore_errors=True)
        if system.environment == PROJECT:
            flags = ["--scheme", system.variant, "--no-eval", "-o", str(folder), "--force"]
            command = [self.python(PROJECT), "-m", "quantkit.cli", "quantize", str(source), *flags]
        else:
            folder.mkdir(parents=True)
            script = str(PEERS / system.script)
            command = [
                self.python(system.environment),
                script,
                "make",
                system.variant,
                str(source),
                str(folder),
            ]
        done = run(command, self.log(f"make-{name}-{model}"))
        return {"seconds": done.seconds, "peak_bytes": done.peak_bytes}

    def key(self, name: str, model: str) -> str:
        """Changes when an artifact of an earlier run is out of date."""
        system = SYSTEMS[name]
        script = (PEERS / system.script).read_text(encoding="utf-8")
        return fingerprint(*ENVIRONMENTS.get(system.environment, ()), script, self.source(model).name)

    def make_if_needed(self, name: str, model: str, num_makes: int) -> dict[str, Any]:
        """Its cost, the lowest of several makes; what is not compared by cost is kept from an earlier run."""
        system = SYSTEMS[name]
        kept, key = self.cache / "models" / model / f"{name}.json", self.key(name, model)
        if kept.exists() and not system.is_fresh and not system.made_from:
            cost: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8"))
            if cost.get("key") == key:
                return cost
        kept.unlink(missing_ok=True)
        say(f"{model}: making {name}")
        costs = [self.make(name, model) for _ in range(num_makes if system.is_fresh else 1)]
        cost = {**{part: min(cost[part] for cost in costs) for part in costs[0]}, "key": key}
        kept.write_text(json.dumps(cost), encoding="utf-8")
        return cost

    def artifact_bytes(self, name: str, model: str) -> int:
        """Bytes of the files that hold the model; configs and tokenizers are not counted, for nobody."""
        folder = self.folder(name, model)
        files = {path for pattern in SYSTEMS[name].files for path in folder.glob(pattern)}
        if not files:
            raise PeerError(f"{folder} holds none of {', '.join(SYSTEMS[name].files)}")
        return sum(path.stat().st_size for path in files)

    def versions(self, environment: str) -> list[str]:
        """Names and versions of the distributions that matter."""
        names = SHOWN_VERSIONS[environment]
        code = (
            "import importlib.metadata as m, json, platform, sys; "
            "found = {name: m.version(name) for name in sys.argv[1:]}; "
            "print(json.dumps({'python': platform.python_version(), **found}))"
        )
        found = run([self.python(environment), "-c", code, *names], self.log(f"versions-{environment}"))
        return [f"{name} {version}" for name, version in found.answer.items()]
