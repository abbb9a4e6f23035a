"""The harness's own command with artifacts among its models: quantkit lm-eval [its arguments].

Every argument is the harness's. Only `--model quantkit` is filled in where no model is named. Two flags of
our own stand alone: --register makes `lm_eval` itself know artifacts, --unregister undoes that.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from quantkit.errors import InputError
from quantkit.evaluation.lm_eval.registration import REGISTER, UNREGISTER, register, unregister

NAMES_A_MODEL = ("--model", "-M", "--config", "-C")


def run(arguments: Sequence[str]) -> None:
    """Register the model, then hand over."""
    own = {REGISTER: register, UNREGISTER: unregister}
    if len(arguments) == 1 and arguments[0] in own:
        print(own[arguments[0]]())
        return
    try:
        from lm_eval.__main__ import cli_evaluate

        from quantkit.evaluation.lm_eval import adapter
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("quantkit"):
            raise
        raise InputError(
            f"the package '{error.name.partition('.')[0]}' is not installed",
            where="lm-eval",
            next_step="pip install 'quantkit-onnx[lm-eval]'",
        ) from error
    sys.argv[:] = ["lm_eval", *with_model(arguments, adapter.MODEL_NAME)]
    cli_evaluate()


def with_model(arguments: Sequence[str], name: str) -> list[str]:
    """The arguments, and the model where an evaluation names none."""
    given = list(arguments)
    evaluates = bool(given) and (given[0] == "run" or given[0].startswith("-"))
    asks_for_help = bool({"-h", "--help"} & set(given))
    is_named = any(each.partition("=")[0] in NAMES_A_MODEL for each in given)
    return given if is_named or asks_for_help or not evaluates else [*given, "--model", name]
