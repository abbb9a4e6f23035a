"""`quantkit bench`: the speed and memory of an artifact, measured again."""

from __future__ import annotations

from typing import Annotated

import typer

from quantkit.cli.app import ArtifactFolder, AsJson, CheckFiles, app, finish, show
from quantkit.errors import InputError


@app.command(short_help="Measure an artifact's speed and memory, by provider.")
def bench(
    folder: ArtifactFolder,
    prompt: Annotated[int | None, typer.Option(help="tokens of the prompt  [default: 128]")] = None,
    decode: Annotated[int | None, typer.Option(help="tokens after it  [default: 32]")] = None,
    threads: Annotated[int | None, typer.Option(help="threads to time with  [default: all cores]")] = None,
    provider: Annotated[
        list[str] | None, typer.Option(help="cpu,qnn,... or NAME@PYTHON of another environment")
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="exit with 1 where a node falls to the CPU")
    ] = False,
    time_limit: Annotated[float, typer.Option(help="seconds that each --provider may take")] = 300.0,
    check: CheckFiles = "quick",
    as_json: AsJson = False,
) -> None:
    """Measure an artifact's speed and memory on the CPU, or speed and placement on providers."""
    from quantkit.evaluation.benchmark import fell_back
    from quantkit.evaluation.measure import environment
    from quantkit.evaluation.verdict import is_broken, judge_providers
    from quantkit.pipeline.artifact import load
    from quantkit.report.document import rerun_json
    from quantkit.runtime.providers.trial import read_choices

    providers = read_choices(provider or (["cpu"] if strict else []))
    if time_limit <= 0:
        raise InputError(f"{time_limit:g} seconds", where="--time-limit", allowed="more than 0")
    artifact = load(folder, threads=threads, check=check)
    output_format = "json" if as_json else "table"
    if not providers:
        from quantkit.report.measurements import rerun_page

        benchmark = artifact.benchmark(prompt=prompt, decode=decode, quiet=False)
        document = rerun_json(
            artifact.described,
            size={"artifact_bytes": artifact.size_bytes},
            latency=[benchmark.latency] if benchmark.latency else [],
            memory=benchmark.memory,
            environment=environment(),
            judgement=artifact.judgement,
            notes=(*benchmark.notes, *benchmark.failures),
        )
        show(document, rerun_page(document), output_format)
        finish(not (benchmark.failures or is_broken(artifact.judgement)))
        return
    from quantkit.report.providers import providers_page

    runs, notes = artifact.benchmark_providers(
        providers, prompt=prompt, decode=decode, time_limit=time_limit, quiet=False
    )
    document = rerun_json(
        artifact.described,
        providers=runs,
        threads=artifact.threads,
        environment=environment(),
        strict=strict,
        judgement=judge_providers(runs),
        notes=notes,
    )
    show(document, providers_page(document), output_format)
    has_failed = any(run.outcome == "failed" or (strict and fell_back(run)) for run in runs)
    finish(not (has_failed or is_broken(judge_providers(runs))))
