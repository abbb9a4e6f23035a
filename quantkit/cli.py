"""The command line: one verb a stage, no logic. Heavy imports happen inside the verb that needs them.

Exit codes: 0 done, 1 a bar was missed or a check found a problem, 2 the input was wrong (one line on stderr).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

import quantkit
from quantkit.errors import InputError

WRONG_INPUT = 2
MISSED = 1

app = typer.Typer(
    name="quantkit",
    help="Post-training quantization and verified ONNX export for Hugging Face transformers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Model = Annotated[str, typer.Argument(help="a local folder, 'demo', a well-known name, or a Hub name")]
MinDim = Annotated[
    str | None,
    typer.Option(help="quantize where max(in, out) reaches this; 'auto' measures here  [default: 256]"),
]
Include = Annotated[list[str] | None, typer.Option(help="only these roles or name globs (repeatable)")]
Exclude = Annotated[list[str] | None, typer.Option(help="all but these roles or name globs (repeatable)")]
RecipeFile = Annotated[Path | None, typer.Option("--recipe", help="a recipe file; flags override it")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="run code that ships with the checkpoint")
]
Artifact = Annotated[Path, typer.Argument(help="a folder that 'quantkit quantize' wrote")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]


@app.callback(invoke_without_command=True)
def top(version: Annotated[bool, typer.Option("--version", help="print the version")] = False) -> None:
    """Post-training quantization and verified ONNX export for Hugging Face transformers."""
    if version:
        typer.echo(f"quantkit {quantkit.__version__}")


@app.command()
def inspect(
    model: Model,
    min_dim: MinDim = None,
    include: Include = None,
    exclude: Exclude = None,
    recipe: RecipeFile = None,
    spec: Annotated[bool, typer.Option("--spec", help="the layer-by-layer specification with costs")] = False,
    device: Annotated[
        list[str] | None, typer.Option(help="a machine of the table, or 'this' to measure (repeatable)")
    ] = None,
    batch: Annotated[str | None, typer.Option(help="sequences at once  [default: 1]")] = None,
    seq: Annotated[str | None, typer.Option(help="tokens of each  [default: up to 1024]")] = None,
    past: Annotated[str | None, typer.Option(help="tokens that are cached already  [default: 0]")] = None,
    output_format: Annotated[
        str, typer.Option("--format", help="table, markdown, json or csv (csv with --spec)")
    ] = "table",
    lists_all: Annotated[bool, typer.Option("--all", help="every block, also those alike")] = False,
    sensitivity: Annotated[
        bool, typer.Option("--sensitivity", help="what each product loses alone; this one reads weights")
    ] = False,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Walk a model: roles, FFN kinds, norms, ties, what the rule picks and why; no weights are read."""
    from quantkit import requests  # noqa: PLC0415

    if sensitivity:
        chosen = {"select.min_dim": min_dim, "select.include": include, "select.exclude": exclude}
        table = requests.sensitivity(
            model=model,
            recipe_path=recipe,
            changes=chosen,
            output_format="json" if as_json else output_format,
        )
        _finish(table)
        return
    text = requests.inspect(
        model=model,
        min_dim=min_dim,
        include=include,
        exclude=exclude,
        recipe_path=recipe,
        wants_spec=spec,
        devices=device or [],
        numbers={"--batch": batch, "--seq": seq, "--past": past},
        output_format="json" if as_json else output_format,
        lists_all=lists_all,
        trust_remote_code=trust_remote_code,
    )
    _finish(text)


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
    statistics: Annotated[
        Path | None, typer.Option(help="keep calibration statistics in this folder, and use them again")
    ] = None,
    resumes: Annotated[
        bool, typer.Option("--resume/--no-resume", help="go on with what an interrupted run has left")
    ] = True,
    target: Annotated[str | None, typer.Option(help="cpu, cpu-avx2, cpu-arm, gpu  [default: cpu]")] = None,
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
    from quantkit import requests  # noqa: PLC0415

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
            "budget.max_kl": max_kl,
            "budget.prefer": prefer,
            "target": target,
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
    _finish(printed, holds)


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
    as_json: AsJson = False,
) -> None:
    """Continue a text with a quantized model; tokens appear as they are made."""
    from quantkit.requests_text import continue_texts  # noqa: PLC0415

    for piece in continue_texts(
        model=model,
        prompts=prompts,
        max_new_tokens=max_new_tokens,
        sampling={"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed},
        threads=threads,
        as_json=as_json,
    ):
        typer.echo(piece, nl=False)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="a folder that 'quantkit quantize' wrote")],
    output_format: Annotated[str, typer.Option("--format", help="table, markdown or json")] = "table",
    as_json: AsJson = False,
) -> None:
    """Show an artifact's report again."""
    from quantkit import requests  # noqa: PLC0415

    text = requests.report(folder=folder, output_format="json" if as_json else output_format)
    _finish(text)


@app.command("eval")
def evaluate(
    folder: Artifact,
    text: Annotated[Path | None, typer.Option(help="a text file  [default: the recipe's]")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="tokens of the text to read")] = None,
    window: Annotated[int | None, typer.Option(help="tokens the model sees at once")] = None,
    stride: Annotated[
        int | None, typer.Option(help="tokens from window to window  [default: half a window]")
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(help="a model or an artifact to compare with  [default: the original, if on this disk]"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure an artifact's accuracy again: perplexity, and beside its original KL and agreement."""
    from quantkit import requests_measure  # noqa: PLC0415

    printed = requests_measure.evaluate(
        folder=folder,
        reference=reference,
        changes={
            "measure.text": str(text) if text else None,
            "measure.max_tokens": max_tokens,
            "measure.window": window,
            "measure.stride": stride,
        },
        as_json=as_json,
    )
    _finish(printed)


@app.command()
def bench(
    folder: Artifact,
    prompt: Annotated[int | None, typer.Option(help="tokens of the prompt  [default: 128]")] = None,
    decode: Annotated[int | None, typer.Option(help="tokens after it  [default: 32]")] = None,
    threads: Annotated[int | None, typer.Option(help="threads to time with  [default: all cores]")] = None,
    provider: Annotated[list[str] | None, typer.Option(help="cpu,qnn,... or NAME@PYTHON, apart")] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="exit with 1 where a node falls to the CPU")
    ] = False,
    time_limit: Annotated[float, typer.Option(help="seconds that each --provider may take")] = 300.0,
    as_json: AsJson = False,
) -> None:
    """Measure an artifact's speed and memory again: on the CPU, or with placement on each provider asked."""
    from quantkit import requests_measure  # noqa: PLC0415

    printed, holds = requests_measure.benchmark(
        folder=folder,
        changes={"measure.prompt": prompt, "measure.decode": decode, "measure.threads": threads},
        providers=provider or (["cpu"] if strict else []),
        strict=strict,
        time_limit=time_limit,
        as_json=as_json,
    )
    _finish(printed, holds)


@app.command()
def compare(
    folders: Annotated[
        list[Path], typer.Argument(help="folders that 'quantkit quantize' wrote, two or more")
    ],
    output_format: Annotated[str, typer.Option("--format", help="table, markdown or json")] = "table",
    as_json: AsJson = False,
) -> None:
    """Put the reports of several artifacts side by side; ratios are to the first."""
    from quantkit import requests_measure  # noqa: PLC0415

    text = requests_measure.compare(folders=folders, output_format="json" if as_json else output_format)
    _finish(text)


@app.command()
def package(
    folder: Artifact,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="a folder, or FILE.zip")] = None,
    force: Annotated[bool, typer.Option("--force", help="replace an older package")] = False,
    as_json: AsJson = False,
) -> None:
    """Pack an artifact for a device that has onnxruntime and tokenizers alone, with a runner."""
    from quantkit import requests_package  # noqa: PLC0415

    typer.echo(requests_package.package(folder=folder, output=output, force=force, as_json=as_json))


@app.command(
    "lm-eval",
    add_help_option=False,  # --help is the harness's
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def lm_eval(context: typer.Context) -> None:
    """Run lm-evaluation-harness with artifacts as models: --model_args path=DIR --tasks NAMES."""
    from quantkit.harness.command import run  # noqa: PLC0415

    run(context.args)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Runtimes, providers and devices of this machine; clashes are named with their cure."""
    from quantkit import requests_measure  # noqa: PLC0415

    _finish(*requests_measure.health(as_json=as_json))


def _finish(printed: str, holds: bool = True) -> None:
    """Print what did not go to the terminal yet; a missed bar, or a problem found, is exit code 1."""
    if printed:
        typer.echo(printed, nl=not printed.endswith("\n"))
    if not holds:
        raise typer.Exit(MISSED)


def main() -> None:
    """Run, and turn every wrong input into one line and exit code 2."""
    try:
        code = app(standalone_mode=False)
    except InputError as error:
        _refuse(str(error))
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        sys.stderr.close()
        sys.exit(0)
    except Exception as error:
        if not hasattr(error, "format_message"):  # a mistake of our own keeps its traceback
            raise
        message = " ".join(error.format_message().split())
        _refuse(f"{message}; next: 'quantkit --help' or 'quantkit VERB --help' lists what is allowed")
    sys.exit(code if isinstance(code, int) else 0)


def _refuse(line: str) -> None:
    print(f"quantkit: {line}", file=sys.stderr)
    sys.exit(WRONG_INPUT)


if __name__ == "__main__":
    main()
