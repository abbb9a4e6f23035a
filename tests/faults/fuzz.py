"""Runs cases of one parser within limits of memory and time: python fuzz.py PARSER CASES SECONDS.

Prints one JSON object: the cases, and the places of tracebacks and hangs with the bytes of the first of each.
"""

from __future__ import annotations

import base64
import contextlib
import json
import resource
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

sys.path.insert(0, str(Path(__file__).parent))
from parsers import PARSERS, prepare

from quantkit.errors import InputError
from quantkit.private.protocol import ProtocolError

MOST_BYTES = 1 << 30  # beyond what the libraries hold
CASE_SECONDS = 10  # of processor time
PACKAGE = str(Path(__file__).parents[2] / "quantkit")


class HangError(BaseException):
    """A case that takes too long."""


def ring(*_: object) -> None:
    raise HangError


def place_of(error: BaseException) -> str:
    """Last line of the package in a traceback, and the error's type."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename.startswith(PACKAGE)] or frames
    return f"{Path(own[-1].filename).name}:{own[-1].lineno} {type(error).__name__}: {str(error)[:200]}"


def fuzz(name: str, cases: int, seconds: float) -> dict[str, Any]:
    parser, result = PARSERS[name], {"cases": 0, "refused": 0, "tracebacks": 0, "hangs": 0, "places": {}}
    with tempfile.TemporaryDirectory(prefix="quantkit-faults-") as place:
        folder = prepare(parser, Path(place))
        file = folder / parser.file
        parser.entry(folder, file)  # the seed is sound, and loads every library
        allocated = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (allocated + MOST_BYTES,) * 2)
        signal.signal(signal.SIGVTALRM, ring)
        end = time.monotonic() + seconds

        def run(content: bytes) -> None:
            if time.monotonic() > end:
                raise KeyboardInterrupt  # passes through hypothesis
            file.write_bytes(content)
            result["cases"] += 1
            signal.setitimer(signal.ITIMER_VIRTUAL, CASE_SECONDS)
            try:
                parser.entry(folder, file)
            except (InputError, ProtocolError) as error:
                result["refused"] += 1
                if len(str(error)) > 5000 or "\n" in str(error):
                    record("tracebacks", ValueError("a message that is no short line"), content)
            except HangError as error:
                record("hangs", error, content)
            except BaseException as error:
                record("tracebacks", error, content)
            finally:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)

        def record(kind: str, error: BaseException, content: bytes) -> None:
            result[kind] += 1
            result["places"].setdefault(place_of(error), base64.b64encode(content[:3000]).decode())

        limits = settings(
            max_examples=cases, database=None, deadline=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        with contextlib.suppress(KeyboardInterrupt):
            seed(1)(limits(given(parser.contents(file.read_bytes()))(run)))()
    return result


if __name__ == "__main__":
    print(json.dumps(fuzz(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))))
