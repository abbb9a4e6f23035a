"""The command of lm-evaluation-harness with artifacts among its models: quantkit lm-eval [its arguments].

Every argument is the harness's; `--model quantkit` is filled in where no model is named.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from quantkit.errors import InputError

NAMES_A_MODEL = ("--model", "-M", "--config", "-C")


def run(arguments: Sequence[str]) -> None:
    """Register the model, then run the harness."""
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
    """The arguments, with `--model` added where an evaluation names no model."""
    evaluates = bool(arguments) and (arguments[0] == "run" or arguments[0].startswith("-"))
    asks_for_help = bool({"-h", "--help"} & set(arguments))
    is_named = any(argument.partition("=")[0] in NAMES_A_MODEL for argument in arguments)
    return [*arguments, *(() if is_named or asks_for_help or not evaluates else ("--model", name))]
