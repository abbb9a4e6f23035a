"""The harness's own command, as typed, finds artifacts once that was asked for, and no longer when undone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from quantkit.evaluation.lm_eval import registration

pytestmark = pytest.mark.once


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder in the place of site-packages."""
    monkeypatch.setattr(registration, "pth_file", lambda: tmp_path / registration.FILE)
    return tmp_path


def at_start_up(site, program, *arguments):
    """Run a program as Python runs it where this folder is site-packages."""
    code = f"import site; site.addsitedir({str(site)!r})\n{program}"
    command = [sys.executable, *arguments[:1], "-c", code, *arguments[1:]]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120, env={**os.environ}
    )


def test_the_file_is_written_and_removed(site):
    told = registration.register()
    path = site / registration.FILE
    assert str(path) in told
    assert path.read_text().startswith("import ")
    assert path.read_text().count("\n") == 1, "Python runs lines one by one"
    assert "removed" in registration.unregister()
    assert not path.exists()
    assert "nothing to remove" in registration.unregister()


def test_other_programs_do_not_load_anything(site):
    registration.register()
    ran = at_start_up(
        site, "import sys; print([name for name in sys.modules if name.startswith('quantkit')])"
    )
    assert (ran.returncode, ran.stdout.strip()) == (0, "[]"), ran.stderr


STAND_IN = """
import sys, types
from pathlib import Path
sys.path.insert(0, {folder!r})
from quantkit.evaluation.lm_eval import registration
registration.wait()
registration.wait()
assert sum(type(each).__name__ == "_Waiting" for each in sys.meta_path) == 1
import lm_eval.models
from lm_eval.api.registry import model_registry
print(model_registry)
assert not any(type(each).__name__ == "_Waiting" for each in sys.meta_path)
"""


def test_the_name_is_added_when_the_models_are_listed(tmp_path):
    """A package laid out like the harness, whose registry is a dictionary with its method."""
    package = tmp_path / "lm_eval"
    (package / "api").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "api" / "__init__.py").write_text("")
    registry = "class Registry(dict):\n    def register(self, name, target):\n        self[name] = target\n"
    (package / "api" / "registry.py").write_text(f"{registry}\nmodel_registry = Registry()\n")
    models = "from lm_eval.api.registry import model_registry\nmodel_registry.register('hf', target='x:Y')\n"
    (package / "models.py").write_text(models)
    ran = subprocess.run(
        [sys.executable, "-c", STAND_IN.format(folder=str(tmp_path))],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == str({"hf": "x:Y", registration.NAME: registration.TARGET})


def test_the_harness_itself_lists_it(site, tmp_path):
    pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install 'quantkit-onnx[lm-eval]'")
    registration.register()
    program = (
        "import sys, lm_eval.models\n"
        "from lm_eval.api.registry import get_model\n"
        "print(get_model('quantkit').__name__)"
    )
    ran = at_start_up(site, program, "-Xlm_eval")  # an option that Python ignores: the name is what counts
    assert ran.stdout.strip().endswith("QuantkitLM"), ran.stderr
