"""The verbs that run a model: `generate` and `lm-eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.app import AsJson, app


@app.command()
def generate(
    model: Annotated[
        str, typer.Argument(help="an artifact's folder, or a model, which then runs in float32")
    ],
    prompts: Annotated[list[str], typer.Argument(help="the beginning of a text; several make a batch")],
    max_new_tokens: Annotated[int, typer.Option(help="tokens to add")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.0,
    top_k: Annotated[int, typer.Option(help="draw from the k most likely; 0 is no limit")] = 0,
    top_p: Annotated[float, typer.Option(help="draw from the most likely that reach p together")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="of the draws")] = None,
    threads: Annotated[int | None, typer.Option(help="threads  [default: all cores]")] = None,
    provider: Annotated[
        str | None, typer.Option(help="cpu, qnn, ...: who runs graphs of fixed shapes  [default: cpu]")
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="http://MACHINE:PORT of a protected model's host; MODEL is its client")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="the host's token  [default: host.token beside MODEL]")
    ] = None,
    features: Annotated[str, typer.Option(help="float32, or float16: half the bytes to a host")] = "float32",
    as_json: AsJson = False,
) -> None:
    """Continue a text with a quantized model; tokens appear as they are made."""
    from quantkit.cli.requests_host import Remote
    from quantkit.cli.requests_text import continue_texts

    for piece in continue_texts(
        model=model,
        prompts=prompts,
        max_new_tokens=max_new_tokens,
        sampling={"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed},
        threads=threads,
        provider=provider,
        as_json=as_json,
        remote=Remote(url=host, token_file=token_file, features=features) if host else None,
    ):
        typer.echo(piece, nl=False)


@app.command(
    "lm-eval",
    add_help_option=False,  # --help is the harness's
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def lm_eval(context: typer.Context) -> None:
    """Run lm-evaluation-harness with artifacts as models: --model_args path=DIR --tasks NAMES."""
    from quantkit.evaluation.lm_eval.command import run

    run(context.args)
