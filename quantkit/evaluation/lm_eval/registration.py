"""The harness's own command knows artifacts too, once that is asked for: quantkit lm-eval --register.

lm-evaluation-harness (0.4.13) reads no entry points of other packages, so `lm_eval --model quantkit` finds
a model only if something has registered it before. A `.pth` file of one line in site-packages does: Python
runs it at its start, it looks at the command that was typed, and for the harness alone it waits for the
list of models to be imported and adds one name to it, which is resolved when it is used. `--unregister`
takes the file away.
"""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from quantkit.errors import InputError

REGISTER, UNREGISTER = "--register", "--unregister"
MODELS = "lm_eval.models"
NAME, TARGET = "quantkit", "quantkit.evaluation.lm_eval.adapter:QuantkitLM"
FILE = "quantkit_lm_eval.pth"
# One line, as Python asks; other programs pay for a look at their own name and nothing else.
LINE = (
    "import sys; "
    "any(name in part for part in sys.orig_argv[:3] for name in ('lm_eval', 'lm-eval')) "
    "and __import__('quantkit.evaluation.lm_eval.registration', fromlist=['wait']).wait()\n"
)


def pth_file() -> Path:
    """Where Python looks for such files."""
    return Path(sysconfig.get_path("purelib")) / FILE


def register() -> str:
    """Write the file; -> what to tell."""
    path = pth_file()
    try:
        path.write_text(LINE, encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"cannot be written ({error})",
            where=str(path),
            next_step="use 'quantkit lm-eval' instead, which needs no file",
        ) from error
    return f"'lm_eval --model {NAME} --model_args path=DIR' works in this environment now, by {path}"


def unregister() -> str:
    """Remove the file; -> what to tell."""
    path = pth_file()
    if not path.exists():
        return f"nothing to remove: there is no {path}"
    path.unlink()
    return f"removed {path}"


def wait() -> None:
    """Add the model as soon as the harness has listed its own."""
    if not any(isinstance(finder, _Waiting) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Waiting())


class _Waiting(MetaPathFinder):
    """Sees one module being imported, and leaves."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's own spec, with one step after it is loaded."""
        if name != MODELS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Adding(spec.loader)
        return spec


class _Adding(Loader):
    """Another loader, and a name for the registry."""

    def __init__(self, inner: Loader) -> None:
        self.inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As it would be."""
        return self.inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Load, then add; a harness that has no such registry is left as it is."""
        self.inner.exec_module(module)
        registry = getattr(sys.modules.get("lm_eval.api.registry"), "model_registry", None)
        if registry is not None and NAME not in registry:
            registry.register(NAME, target=TARGET)
