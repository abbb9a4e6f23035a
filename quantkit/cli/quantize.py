"""`quantkit quantize`: the main job."""

from __future__ import annotations

import json
import webbrowser
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantkit.cli.app import (
    AsJson,
    Exclude,
    Include,
    MinDim,
    RecipeFile,
    TrustRemoteCode,
    app,
    finish,
    parse_size,
    parse_transforms,
    show,
)
from quantkit.errors import InputError

if TYPE_CHECKING:
    from quantkit.pipeline.options import Options


@app.command(short_help="Quantize, export, check and measure a model.")
def quantize(
    model: Annotated[
        str | None, typer.Argument(help="a folder, 'demo', a well-known name, or a Hub name")
    ] = None,
    min_dim: MinDim = None,
    include: Include = None,
    exclude: Exclude = None,
    recipe: RecipeFile = None,
    scheme: Annotated[
        str | None, typer.Option(help="weight grid and activation format  [default: by kind of model]")
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
        bool, typer.Option("--bias-correction", help="correct the mean output of each layer by its bias")
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
    target_size: Annotated[
        str | None, typer.Option(help="search the most accurate formats within 120MB, or 0.2 of the source")
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
    resumes: Annotated[bool, typer.Option("--resume/--no-resume", help="continue an interrupted run")] = True,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="processes that calibrate and round, a thread each  [default: this one]"),
    ] = None,
    engine: Annotated[str, typer.Option(help="of the workers: local, or ray")] = "local",
    address: Annotated[
        str | None, typer.Option(help="ray: HOST:PORT of a cluster, or auto  [default: this machine]")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="cpu, cpu-avx2, cpu-arm, gpu, npu, openvino  [default: cpu]")
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
    opens: Annotated[bool, typer.Option("--open", help="open report.html in the browser")] = False,
    plans_only: Annotated[
        bool, typer.Option("--dry-run", help="show decisions, size, minutes and memory; write nothing")
    ] = False,
    trust_remote_code: TrustRemoteCode = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="show the whole report: spreads, losses, protocol, times")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Quantize, export, check and measure a model; ends in a table and a report."""
    from quantkit.pipeline.options import Options
    from quantkit.pipeline.quantize import quantize as quantize_model
    from quantkit.report.document import report_json
    from quantkit.report.quantization import brief_page, quantization_page
    from quantkit.report.tables import print_page
    from quantkit.report.web_page import PAGE_FILE

    options = Options(
        min_dim=parse_size(min_dim),
        include=include,
        exclude=exclude,
        scheme=scheme,
        fit=fit,
        layers=parse_layers(layer),
        transforms=parse_transforms(transform),
        unties_head=unties_head or None,
        bias_correction=bias_correction or None,
        calibration_text=str(calibration_text) if calibration_text else None,
        calibration_windows=calibration_windows,
        calibration_length=calibration_length,
        max_ppl_increase=parse_share(max_ppl_increase),
        max_kl=max_kl,
        target_size=target_size,
        prefer=prefer,
        cache=cache,
        keep_latent=keep_latent or None,
        target=target,
        prompt_length=prompt_length,
        cache_length=cache_length,
        random_weights=random_weights or None,
        accuracy=None if measures else False,
        latency=None if measures else False,
        memory=None if measures else False,
        text=str(text) if text else None,
        max_tokens=max_tokens,
        threads=threads,
    )
    if plans_only:
        show_dry_run(model, recipe, output, options, force=force, trusts=trust_remote_code, as_json=as_json)
        return
    artifact = quantize_model(
        model,
        recipe=recipe,
        output=output,
        force=force,
        keep_checkpoint=keep_checkpoint,
        trust_remote_code=trust_remote_code,
        statistics=statistics,
        resume=resumes,
        workers=workers,
        engine=engine,
        address=address,
        quiet=False,
        **options,
    )
    document = report_json(artifact.report)
    if as_json:
        typer.echo(json.dumps({"artifact": str(artifact.folder), **document}, indent=2))
    else:
        print_page(quantization_page(document) if verbose else brief_page(document))
        typer.echo(f"artifact: {artifact.folder}\nreport:   {artifact.folder / 'report.md'}, .html")
    if opens:
        webbrowser.open((artifact.folder / PAGE_FILE).resolve().as_uri())
    finish(artifact.report.is_sound and not artifact.report.failures)


def show_dry_run(
    model: str | None,
    recipe: Path | None,
    output: Path | None,
    options: Options,
    *,
    force: bool,
    trusts: bool,
    as_json: bool,
) -> None:
    """The decisions of a run, the size of its files, its minutes and its peak memory."""
    import time

    import psutil

    from quantkit.model.model_map import to_json
    from quantkit.pipeline.dry_run import dry_run, in_new_process
    from quantkit.report.dry_run import dry_run_page

    start_seconds = time.time() - psutil.Process().create_time()
    forecast = dry_run(
        model, recipe=recipe, output=output, force=force, trust_remote_code=trusts, quiet=False, **options
    )
    document = to_json(in_new_process(forecast, start_seconds))
    show(document, dry_run_page(document), "json" if as_json else "table")


def parse_layers(texts: Sequence[str] | None) -> Mapping[str, str] | None:
    """The values of --layer: pattern -> scheme."""
    if not texts:
        return None
    layers = {}
    for text in texts:
        pattern, separator, scheme = text.rpartition("=")
        if not (separator and pattern and scheme):
            raise InputError(
                f"'{text}'",
                where="--layer",
                allowed="PATTERN=SCHEME or PATTERN=float",
                next_step="--layer ffn_down=int8_block32 gives every down projection smaller blocks",
            )
        layers[pattern] = scheme
    return layers


def parse_share(text: str | None) -> float | None:
    """0.005 from "0.5%" or "0.005"; 50 is refused, because it may mean 50%."""
    if not text:
        return None
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise InputError(
            f"'{text}'",
            where="--max-ppl-increase",
            allowed="a percentage above 0% and below 100%, such as 0.5%, or a share below 1, such as 0.005",
            next_step=f"{text}% if you mean percent" if value >= 1 and not text.endswith("%") else "",
        )
    return value
