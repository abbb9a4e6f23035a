"""One provider alone in a process: vendors' libraries crash and hang, and must not take others with them.

    python -m quantkit.runtime.providers.trial FOLDER --provider NAME --threads N --prompt N --decode N
        --seconds S --patience S [--ids FILE.npy --logits FILE.npy]

prints what it found as one line of JSON, again after each stage with all that is known by then. So the last
line says how far a process came that died, and what it was doing. `try_provider` starts such a process, waits
for a limited time and reads that line. The process needs onnxruntime, numpy and psutil, so it may be the
interpreter of another environment, where a wheel lives that cannot stand beside this one's.

Order matters: times and memory come before the checks that open the file again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import quantkit
from quantkit.errors import InputError
from quantkit.runtime.providers.table import PROVIDERS, one_line

MODULE = "quantkit.runtime.providers.trial"
Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A provider by name, and whose onnxruntime shall run it."""

    name: str
    python: str | None = None  # another environment's interpreter


def read_asked(texts: Sequence[str]) -> tuple[Asked, ...]:
    """`cpu,qnn` or `openvino@/other/bin/python`; an unknown name lists those that are known."""
    asked = []
    for text in filter(None, (part.strip() for each in texts for part in each.split(","))):
        name, _, python = text.partition("@")
        if name not in PROVIDERS:
            raise InputError(f"no provider '{name}'", where="--provider", allowed=", ".join(PROVIDERS))
        if python and not Path(python).expanduser().is_file():
            raise InputError("no such interpreter", where=f"--provider {text}", allowed="NAME@PYTHON")
        asked.append(Asked(name=name, python=str(Path(python).expanduser().absolute()) if python else None))
    if texts and not asked:
        raise InputError("no provider", where="--provider", allowed=", ".join(PROVIDERS))
    return tuple(asked)


def try_provider(
    folder: Path,
    asked: Asked,
    *,
    threads: int,
    prompt: int,
    decode: int,
    seconds: float,
    time_limit: float,
    ids: Path | None = None,
    logits: Path | None = None,
) -> Json:
    """What a process of its own found, or what became of it: never an exception of the vendor's."""
    # Times come first and take a few seconds; half of the limit is for the logits of a slow emulator.
    numbers: dict[str, float] = {"threads": threads, "prompt": prompt, "decode": decode, "seconds": seconds}
    numbers["patience"] = time_limit / 2
    command = [asked.python or sys.executable, "-m", MODULE, str(folder), "--provider", asked.name]
    command += [text for key, value in numbers.items() for text in (f"--{key}", str(value))]
    if ids and logits:
        command += ["--ids", str(ids), "--logits", str(logits)]
    if asked.python is None:
        return outcome_of(run_limited(command, time_limit=time_limit), asked)
    with tempfile.TemporaryDirectory(prefix="quantkit-") as made:
        _lend_package(Path(made))
        ended = run_limited(command, time_limit=time_limit, environment={**os.environ, "PYTHONPATH": made})
    return outcome_of(ended, asked)


def _lend_package(folder: Path) -> None:
    """This package alone for another interpreter, without the packages that stand beside it here."""
    package = Path(quantkit.__file__).parent
    try:
        (folder / package.name).symlink_to(package, target_is_directory=True)
    except OSError:  # Windows asks for a privilege
        shutil.copytree(package, folder / package.name, ignore=shutil.ignore_patterns("assets"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """A process that is over."""

    found: Json  # its last line of JSON
    exit_code: int | None  # None: it was stopped at the time limit; negative: the signal that ended it
    errors: str
    time_limit: float


def run_limited(
    command: Sequence[str], *, time_limit: float, environment: Mapping[str, str] | None = None
) -> Ended:
    """Run a command, and end it with all that it started where it takes too long."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        # A session of its own, so that the signal which ends it reaches its children and nobody else.
        process = subprocess.Popen(
            command, stdout=output, stderr=errors, env=environment, start_new_session=os.name == "posix"
        )
        exit_code: int | None = None
        try:
            exit_code = process.wait(timeout=time_limit)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if exit_code is None:
                _kill(process)
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode("utf-8", errors="replace"))
    return Ended(found=_last_json(texts[0]), exit_code=exit_code, errors=texts[1], time_limit=time_limit)


def _kill(process: subprocess.Popen[bytes]) -> None:
    if os.name == "posix":
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()


def _last_json(text: str) -> Json:
    """The vendor's library may print between and behind our lines."""
    for line in reversed(text.splitlines()):
        if line.startswith('{"stage"'):
            try:
                found: Json = json.loads(line)
            except ValueError:  # cut off in the middle
                continue
            return found
    return {}


def outcome_of(ended: Ended, asked: Asked) -> Json:
    """What it found, with what became of it: `outcome`, and `why_not` with its `cure`."""
    found = dict(ended.found)
    stage = found.pop("stage", "starting Python")
    if ended.exit_code == 0 and stage == "done":
        failed = "why_not" in found
        if failed and "start_ms" not in found:
            return {"outcome": "failed", "cure": PROVIDERS[asked.name].install, **found}
        return {"outcome": "partly" if failed or found.get("notes") else "ran", **found}
    update = f"update the driver, then: pip install --upgrade {PROVIDERS[asked.name].package}"
    if ended.exit_code is None:
        why_not = f"no answer within {ended.time_limit:g} s while {stage}"
        cure = f"--time-limit {2 * ended.time_limit:g} waits longer; if it hangs, {update}"
    elif ended.exit_code < 0 or ended.exit_code > 255:
        why_not = f"its process died of {_death(ended.exit_code)} while {stage}"
        cure = update
    else:
        last = (ended.errors.strip().splitlines() or ["no reason given"])[-1]
        why_not = f"exit code {ended.exit_code} while {stage}: {one_line(last)}"
        cure = (
            f"{asked.python or 'python'} -m pip install onnxruntime numpy psutil"
            if not ended.found
            else update
        )
    return {
        "outcome": "partly" if "start_ms" in found else "failed",
        **found,
        "why_not": why_not,
        "cure": cure,
    }


def _death(exit_code: int) -> str:
    if exit_code > 255:  # Windows: 0xC0000005 is an access violation
        return f"exception {exit_code:#x}"
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"


def main(arguments: Sequence[str]) -> None:
    """The process's own side."""
    parser = argparse.ArgumentParser(prog=MODULE)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--provider", choices=PROVIDERS, required=True)
    for name in ("threads", "prompt", "decode"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--patience", type=float, required=True)
    parser.add_argument("--ids", type=Path)
    parser.add_argument("--logits", type=Path)
    asked = parser.parse_args(arguments)
    found: Json = {}

    def say(stage: str) -> None:
        print(json.dumps({"stage": stage, **found}), flush=True)

    say("loading onnxruntime")
    # Not before: a package that is missing here, or a library that does not load, shall be told as well.
    from quantkit.runtime.providers.trial_stages import STAGES, Trial

    trial = Trial(asked=asked, provider=PROVIDERS[asked.provider], found=found)
    for stage, run in STAGES:
        say(stage)
        try:
            run(trial)
        except Exception as error:  # onnxruntime's and the vendor's share no base class
            if "start_ms" not in found:
                found.setdefault("why_not", one_line(error))
                break
            found.setdefault("notes", []).append(f"{stage}: {one_line(error)}")
    say("done")


if __name__ == "__main__":
    main(sys.argv[1:])
