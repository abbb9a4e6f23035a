"""Trial of one provider in a process of its own: vendors' libraries crash and hang.

    python -m quantkit.runtime.providers.trial FOLDER --provider NAME --threads N --prompt N --decode N
        --seconds S --patience S [--ids FILE.npy --logits FILE.npy]

prints its results as one line of JSON, before each stage with all results until then. So the last line of a
process that died names its stage. `try_provider` starts such a process, waits for a limited time and reads
the last line. The process needs onnxruntime, numpy and psutil alone, so it may be the interpreter of another
environment, whose onnxruntime wheel cannot stand beside this one's.

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
from quantkit.errors import InputError, not_one_of
from quantkit.runtime.machine.disk import temporary_folder
from quantkit.runtime.providers.table import PROVIDERS, one_line

MODULE = "quantkit.runtime.providers.trial"
Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProviderChoice:
    """A provider by name, and the interpreter whose onnxruntime runs it."""

    name: str
    python: str | None = None  # another environment's interpreter


def read_choices(texts: Sequence[str]) -> tuple[ProviderChoice, ...]:
    """`cpu,qnn` or `openvino@/other/bin/python`."""
    choices = []
    for text in filter(None, (part.strip() for names in texts for part in names.split(","))):
        name, _, python = text.partition("@")
        if name not in PROVIDERS:
            raise not_one_of(name, PROVIDERS, where="--provider", what=f"no provider '{name}'")
        if python and not Path(python).expanduser().is_file():
            raise InputError("no such interpreter", where=f"--provider {text}", allowed="NAME@PYTHON")
        choices.append(
            ProviderChoice(name=name, python=str(Path(python).expanduser().absolute()) if python else None)
        )
    if texts and not choices:
        raise InputError("no provider", where="--provider", allowed=", ".join(PROVIDERS))
    return tuple(choices)


def try_provider(
    folder: Path,
    choice: ProviderChoice,
    *,
    threads: int,
    prompt: int,
    decode: int,
    seconds: float,
    time_limit: float,
    ids: Path | None = None,
    logits: Path | None = None,
) -> Json:
    """Results of a process of its own, with its outcome; never an exception of the vendor's."""
    # Times come first and take a few seconds; half of the limit is for the logits of a slow emulator.
    numbers: dict[str, float] = {"threads": threads, "prompt": prompt, "decode": decode, "seconds": seconds}
    numbers["patience"] = time_limit / 2
    command = [choice.python or sys.executable, "-m", MODULE, str(folder), "--provider", choice.name]
    command += [text for key, value in numbers.items() for text in (f"--{key}", str(value))]
    if ids and logits:
        command += ["--ids", str(ids), "--logits", str(logits)]
    if choice.python is None:
        return outcome_of(run_limited(command, time_limit=time_limit), choice)
    with temporary_folder() as path:
        _lend_package(path)
        ended = run_limited(
            command, time_limit=time_limit, environment={**os.environ, "PYTHONPATH": str(path)}
        )
    return outcome_of(ended, choice)


def _lend_package(folder: Path) -> None:
    """This package alone on the path of another interpreter, without the packages of this environment."""
    package = Path(quantkit.__file__).parent
    try:
        (folder / package.name).symlink_to(package, target_is_directory=True)
    except OSError:  # Windows asks for a privilege
        shutil.copytree(package, folder / package.name, ignore=shutil.ignore_patterns("assets"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    results: Json  # its last line of JSON
    exit_code: int | None  # None: it was stopped at the time limit; negative: the signal that ended it
    errors: str
    time_limit: float


def run_limited(
    command: Sequence[str], *, time_limit: float, environment: Mapping[str, str] | None = None
) -> Ended:
    """Run a command; at the time limit, kill it and its children."""
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
    return Ended(results=_last_json(texts[0]), exit_code=exit_code, errors=texts[1], time_limit=time_limit)


def _kill(process: subprocess.Popen[bytes]) -> None:
    if os.name == "posix":
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()


def _last_json(text: str) -> Json:
    """The last line of ours; the vendor's library may print between and behind."""
    for line in reversed(text.splitlines()):
        if line.startswith('{"stage"'):
            try:
                results: Json = json.loads(line)
            except ValueError:  # cut off in the middle
                continue
            return results
    return {}


def outcome_of(ended: Ended, choice: ProviderChoice) -> Json:
    """The results with `outcome`, and `why_not` and `cure` of a failure."""
    results = dict(ended.results)
    stage = results.pop("stage", "starting Python")
    if ended.exit_code == 0 and stage == "done":
        failed = "why_not" in results
        if failed and "start_ms" not in results:
            return {"outcome": "failed", "cure": PROVIDERS[choice.name].install, **results}
        return {"outcome": "partly" if failed or results.get("notes") else "ran", **results}
    update = f"update the driver, then: pip install --upgrade {PROVIDERS[choice.name].package}"
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
            f"{choice.python or 'python'} -m pip install onnxruntime numpy psutil"
            if not ended.results
            else update
        )
    return {
        "outcome": "partly" if "start_ms" in results else "failed",
        **results,
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
    """The side of the trial's own process."""
    parser = argparse.ArgumentParser(prog=MODULE)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--provider", choices=PROVIDERS, required=True)
    for name in ("threads", "prompt", "decode"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--patience", type=float, required=True)
    parser.add_argument("--ids", type=Path)
    parser.add_argument("--logits", type=Path)
    options = parser.parse_args(arguments)
    results: Json = {}

    def say(stage: str) -> None:
        print(json.dumps({"stage": stage, **results}), flush=True)

    say("loading onnxruntime")
    # Imported here, so that a missing package or a library that does not load is reported too.
    from quantkit.runtime.providers.trial_stages import STAGES, Trial

    trial = Trial(options=options, provider=PROVIDERS[options.provider], results=results)
    for stage, run in STAGES:
        say(stage)
        try:
            run(trial)
        except Exception as error:  # onnxruntime's and the vendor's share no base class
            if "start_ms" not in results:
                results.setdefault("why_not", one_line(error))
                break
            results.setdefault("notes", []).append(f"{stage}: {one_line(error)}")
    say("done")


if __name__ == "__main__":
    main(sys.argv[1:])
