"""`quantkit lm-eval`: lm-evaluation-harness with artifacts as models."""

from __future__ import annotations

import typer

from quantkit.cli.app import app


@app.command(
    "lm-eval",
    short_help="Run lm-evaluation-harness on artifacts.",
    add_help_option=False,  # --help is the harness's
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def lm_eval(context: typer.Context) -> None:
    """Run lm-evaluation-harness with artifacts as models: --model_args path=DIR --tasks NAMES."""
    from quantkit.evaluation.lm_eval.command import run

    run(context.args)
