"""`quantkit quantize`: the whole job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.app import AsJson, Exclude, Include, MinDim, RecipeFile, TrustRemoteCode, app, finish


@app.command()
def quantize(
    model: Annotated[
        str | None, typer.Argument(help="a folder, 'demo', a well-known name, or a Hub name")
    ] = None,
    min_dim: MinDim = None,
    include: Include = None,
    exclude: Exclude = None,
    recipe: RecipeFile = None,
    scheme: Annotated[
        str | None, typer.Option(help="how weights become integers  [default: by kind of model]")
    ] = None,
    fit: Annotated[
        str | None, typer.Option(help="rtn, mse, output or gptq  [default: rtn at 8 bits, gptq below]")
    ] = None,
    layer: Annotated[
        list[str] | None, typer.Option(help="PATTERN=SCHEME, or PATTERN=float, for some layers (repeatable)")
    ] = None,
    transform: Annotated[
        list[str] | None,
        typer.Option(help="smoothquant, awq, hadamard, ... or none (repeatable)  [default: quick smoothing]"),
    ] = None,
    unties_head: Annotated[
        bool, typer.Option("--untie-head", help="let a transform store a tied head apart from its table")
    ] = False,
    bias_correction: Annotated[
        bool, typer.Option("--bias-correction", help="let biases make up for a shifted mean output")
    ] = False,
    calibration_text: Annotated[
        Path | None, typer.Option(help="a text file, or token ids in .npy  [default: bundled]")
    ] = None,
    calibration_windows: Annotated[int | None, typer.Option(help="windows of it  [default: 32]")] = None,
    calibration_length: Annotated[int | None, typer.Option(help="tokens a window  [default: 512]")] = None,
    max_ppl_increase: Annotated[
        str | None, typer.Option(help="search formats that keep perplexity within this, such as 0.5%")
    ] = None,
    max_kl: Annotated[
        float | None, typer.Option(help="search formats that keep the KL divergence within this, in nats")
    ] = None,
    prefer: Annotated[str | None, typer.Option(help="size or speed, for a search  [default: size]")] = None,
    cache: Annotated[
        str | None, typer.Option(help="float32, or int8: keys and values in a quarter of the memory")
    ] = None,
    keep_latent: Annotated[
        bool, typer.Option("--keep-latent", help="give the latents of a wsFFN as outputs too")
    ] = False,
    statistics: Annotated[
        Path | None, typer.Option(help="keep calibration statistics in this folder, and use them again")
    ] = None,
    resumes: Annotated[
        bool, typer.Option("--resume/--no-resume", help="go on with what an interrupted run has left")
    ] = True,
    target: Annotated[
        str | None, typer.Option(help="cpu, cpu-avx2, cpu-arm, gpu, npu  [default: cpu]")
    ] = None,
    prompt_length: Annotated[
        int | None, typer.Option(help="npu: tokens that are read at once  [default: 128]")
    ] = None,
    cache_length: Annotated[
        int | None, typer.Option(help="npu: tokens whose keys and values are kept  [default: 512]")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="the folder to write  [default: MODEL-SCHEME]")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="replace an older artifact")] = False,
    measures: Annotated[
        bool, typer.Option("--eval/--no-eval", help="measure accuracy, latency and memory afterwards")
    ] = True,
    text: Annotated[Path | None, typer.Option(help="a text file to measure accuracy on")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="tokens of the text to read  [default: 16384]")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="threads to time with  [default: all cores]")] = None,
    random_weights: Annotated[
        bool,
        typer.Option("--random-weights", help="seeded weights: size and speed of any known architecture"),
    ] = False,
    keep_checkpoint: Annotated[
        bool, typer.Option("--keep-checkpoint", help="keep the quantized safetensors of a small model too")
    ] = False,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Quantize, export, check and measure: the whole job, ending in a table and a report."""
    from quantkit.cli import requests

    printed, holds = requests.quantize(
        model=model,
        recipe_path=recipe,
        changes={
            "select.min_dim": min_dim,
            "select.include": include,
            "select.exclude": exclude,
            "scheme": scheme,
            "fit": fit,
            "transforms": transform,
            "unties_head": unties_head or None,
            "bias_correction": bias_correction or None,
            "calibration.text": str(calibration_text) if calibration_text else None,
            "calibration.windows": calibration_windows,
            "calibration.length": calibration_length,
            "cache": cache,
            "keep_latent": keep_latent or None,
            "budget.max_kl": max_kl,
            "budget.prefer": prefer,
            "target": target,
            "static.prompt": prompt_length,
            "static.cache": cache_length,
            "random_weights": random_weights or None,
            "measure.text": str(text) if text else None,
            "measure.max_tokens": max_tokens,
            "measure.threads": threads,
        },
        layers=layer,
        max_ppl_increase=max_ppl_increase,
        statistics=statistics,
        resumes=resumes,
        output=output,
        force=force,
        measures=measures,
        keeps_checkpoint=keep_checkpoint,
        trust_remote_code=trust_remote_code,
        as_json=as_json,
    )
    finish(printed, holds)
