"""Peak memory of real processes that take a known amount."""

from __future__ import annotations

import os
import sys

import numpy as np
import pytest

from quantkit.evaluation.memory import floor_ms, run_and_measure

pytestmark = pytest.mark.once
MB = 1_000_000
BARE = 60 * MB  # a python without packages takes 10 to 20
BIG = 150 * MB
on_unix = pytest.mark.skipif(os.name == "nt", reason="signals and shells are Unix's")


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


def test_a_peak_that_is_over_before_the_end_is_seen():
    found = run_and_measure(python(f"x = bytearray({BIG}); del x; print('done')"))
    assert BIG <= found.peak_bytes <= BIG + BARE
    assert (found.exit_code, found.output.strip(), found.errors) == (0, "done", "")
    assert 0 < found.seconds < 60


def test_a_small_child_of_a_large_parent_is_small():
    ballast = np.ones(BIG // 8)
    found = run_and_measure(python("pass"))
    assert MB < found.peak_bytes < BARE < ballast.nbytes


def test_output_larger_than_a_pipe_does_not_stop_the_child():
    found = run_and_measure(python("import sys; print('x' * 500_000); print('y' * 500_000, file=sys.stderr)"))
    assert len(found.output.strip()) == len(found.errors.strip()) == 500_000


def test_the_environment_is_handed_on():
    found = run_and_measure(
        python("import os; print(os.environ['A'])"), environment=dict(os.environ) | {"A": "b"}
    )
    assert found.output.strip() == "b"


def test_failures_are_reported():
    found = run_and_measure(python("import sys; print('why', file=sys.stderr); sys.exit(3)"))
    assert (found.exit_code, found.errors.strip()) == (3, "why")
    with pytest.raises(OSError, match="no-such-command"):
        run_and_measure(["no-such-command"])


@on_unix
def test_a_signal_is_a_negative_exit_code():
    assert run_and_measure(python("import os; os.kill(os.getpid(), 9)")).exit_code == -9


def test_the_floor_is_bytes_over_bandwidth():
    assert floor_ms(bytes_read=124e6, bandwidth_gb_per_s=36) == pytest.approx(3.4444, rel=1e-4)
    assert floor_ms(bytes_read=1e9, bandwidth_gb_per_s=1) == pytest.approx(1000)
