"""Float ONNX files of any architecture that optimum can trace: the way in for what is not emitted directly.

Only this module knows optimum; quantkit's own encoder-decoders are traced without it. It is kept quiet, away
from the network, and away from code that a checkpoint brings, unless that was asked for; what comes out is
lowered to integers by `lower.py`.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quantkit.errors import InputError
from quantkit.export.traced.trace_parts import trace_parts
from quantkit.model.load import open_source
from quantkit.model.reference import reference_model

OPSET = 18  # the newest that the tracing exporter writes without converting
TASKS: dict[str, str] = {  # how a class name ends -> what optimum calls its task
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForConditionalGeneration": "text2text-generation",
    "ForMaskedLM": "fill-mask",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "Model": "feature-extraction",
}
OWN_ENCODER_DECODERS = ("OneWideForConditionalGeneration",)  # traced here, which no package need know
WITH_PAST = ("text-generation", "text2text-generation")
SUPPORTED = "below 4.58 for optimum-onnx 0.1"
INSTALL = "pip install 'quantkit-onnx[trace]'"


def trace(
    folder: Path, out_dir: Path, *, model_type: str, architecture: str, trust_remote_code: bool = False
) -> tuple[Path, ...]:
    """Trace the model that lies in `folder`; the files, with their cache where it generates text."""
    if architecture in OWN_ENCODER_DECODERS:
        with _quiet():
            return trace_parts(reference_model(open_source(str(folder))), out_dir, opset=OPSET)
    task = _supported_task(folder, model_type, architecture)
    with _quiet():
        from optimum.exporters.onnx import main_export

        try:
            main_export(
                str(folder),
                out_dir,
                task=task,
                opset=OPSET,
                dtype="fp32",
                local_files_only=True,
                trust_remote_code=trust_remote_code,
                do_validation=False,  # the lowered file is compared with the original instead
                no_post_process=True,  # else it would fold two decoders into one file with branches
            )
        except InputError:
            raise
        except Exception as error:  # the exporter runs the model's own code, which may raise anything
            raise InputError(
                f"the tracing exporter failed ({type(error).__name__}: {str(error)[:300]})",
                where=str(folder),
                next_step="use a model of a family that is emitted directly, or report this architecture",
            ) from error
    return tuple(sorted(out_dir.glob("*.onnx")))


def why_not_trace() -> str | None:
    """Why nothing can be traced in this environment, or None."""
    try:
        with _quiet():
            import optimum.exporters.onnx.model_configs  # noqa: F401
    except ImportError as error:
        return " ".join(str(error).split())[:200]
    return None


def _supported_task(folder: Path, model_type: str, architecture: str) -> str:
    reason = why_not_trace()
    if reason:
        raise InputError(
            f"{architecture} goes through optimum's ONNX exporter, which cannot be imported ({reason})",
            where=str(folder),
            allowed=f"optimum-onnx, beside a transformers that it supports ({SUPPORTED})",
            next_step=f"{INSTALL}, in an environment of its own if this one needs a newer transformers",
        )
    with _quiet():
        from optimum.exporters.onnx import model_configs  # noqa: F401 - fills the table of tasks
        from optimum.exporters.tasks import TasksManager

        try:
            tasks = TasksManager.get_supported_tasks_for_model_type(
                model_type, "onnx", library_name="transformers"
            )
            known = set(tasks)
        except KeyError:
            known = set()
    base = next((task for end, task in TASKS.items() if architecture.endswith(end)), None)
    wanted = [f"{base}-with-past"] if base in WITH_PAST else []
    found = next((task for task in [*wanted, base] if task in known), None)
    if found is None:
        raise InputError(
            f"optimum cannot trace {architecture} of model type '{model_type}'",
            where=str(folder),
            allowed=", ".join(sorted(known)) or "model types that optimum-onnx knows",
            next_step="use a model of a family that is emitted directly",
        )
    return found


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Nothing on the terminal: the exporter's advice is for its own users."""
    before: Any = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
