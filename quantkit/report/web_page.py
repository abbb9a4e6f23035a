"""The web page of a report: one file with pictures, styles and script, which needs no network.

The page is made from the content of report.json alone. The template escapes every value, and the page's own
policy runs no script but the template's.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from quantkit.report.alarms import PHASES, alarms_of
from quantkit.report.answers import Answers, answers_of
from quantkit.report.clients import Code, loading, reproducing
from quantkit.report.comparison import METRICS, Comparison, comparison_page, short_names
from quantkit.report.figures import figures, megabytes
from quantkit.report.histograms import PackPictures, pack_pictures
from quantkit.report.inspection import plan_lines
from quantkit.report.known_points import known_points_picture
from quantkit.report.layer_map import LayerMap, layer_map, layer_table
from quantkit.report.losses import budget_line, formats_text, loss_lines, loss_tables, scheme_text
from quantkit.report.measurements import (
    head_figures,
    machine_line,
    measured_tables,
    protocol_lines,
    shows_vectors,
)
from quantkit.report.pictures import Bars, Point, Scatter, bars_of, scatter
from quantkit.report.roofline import roofline_picture, roofline_table
from quantkit.report.tables import Json, Table

PAGE_FILE = "report.html"
TEMPLATE = Path(__file__).parents[1] / "assets" / PAGE_FILE
VERDICTS = {
    "faithful": "Faithful to the original",
    "degraded": "Degraded",
    "broken": "Broken",
    "none": "Not judged",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """A figure of the first screen."""

    name: str
    value: str
    detail: str
    unit: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class WebPage:
    """Everything that the template shows; empty parts are left out."""

    title: str
    kicker: str
    subtitle: str
    verdict: str = ""
    verdict_text: str = ""
    summary: str = ""
    tiles: tuple[Tile, ...] = ()
    alarms: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    protocol: tuple[str, ...] = ()
    answers: Answers | None = None
    layer_map: LayerMap | None = None
    layers: Table | None = None
    scatters: tuple[Scatter, ...] = ()
    bars: tuple[Bars, ...] = ()
    roofline: Scatter | None = None
    roofline_table: Table | None = None
    losses: tuple[Table, ...] = ()
    histograms: tuple[PackPictures, ...] = ()
    decisions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    reproduce: tuple[Code, ...] = ()
    loading: tuple[Code, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    machine: str = ""


def report_html(document: Json) -> str:
    """The page of one artifact, from the content of report.json."""
    judgement = document.get("judgement")
    verdict = judgement["verdict"] if judgement else "none"
    has_layers, roofline = bool(document.get("layers")), document.get("roofline")
    searched = _search_picture(document.get("search")) or known_points_picture(document)
    page = WebPage(
        title=document["model"],
        kicker="Quantization report",
        subtitle=f"{scheme_text(document)} for {document['target']}",
        verdict=verdict,
        verdict_text=VERDICTS.get(verdict, verdict),
        summary="; ".join(_summary(document)),
        tiles=tuple(_tiles(document)),
        alarms=alarms_of(document),
        tables=measured_tables(document),
        protocol=tuple(protocol_lines(document)),
        answers=answers_of(document.get("samples")),
        layer_map=layer_map(document),
        layers=layer_table(document) if has_layers else None,
        scatters=(searched,) if searched else (),
        bars=tuple(bars for bars in _bars(document) if bars),
        roofline=roofline_picture(roofline) if roofline else None,
        roofline_table=roofline_table(roofline) if roofline else None,
        losses=tuple(loss_tables(document)),
        histograms=pack_pictures(document.get("histograms", ())),
        decisions=(*plan_lines(document), *loss_lines(document), *_kept_lines(document)),
        notes=tuple(document.get("notes", ())),
        reproduce=tuple(reproducing(document)),
        loading=tuple(loading(document)),
        files=document.get("files", {}),
        machine=machine_line(document["environment"]),
    )
    return _rendered(page)


def comparison_html(*comparisons: Comparison) -> str:
    """The page of several artifacts; with several comparisons, the title of each part names its model."""
    texts = [comparison_page(comparison) for comparison in comparisons]
    suffixes = [
        f": {comparison.artifacts[0].model}" if len(comparisons) > 1 else "" for comparison in comparisons
    ]
    page = WebPage(
        title=", ".join(name for comparison in comparisons for name in _names(comparison)),
        kicker="Comparison of artifacts",
        subtitle="; ".join(text.head[0] for text in texts),
        tables=tuple(
            replace(table, title=table.title + suffix)
            for text, suffix in zip(texts, suffixes, strict=True)
            for table in text.tables
        ),
        protocol=tuple(line for text in texts for line in (*text.head[1:], *text.foot)),
        notes=tuple(note for text in texts for note in text.warnings),
        scatters=tuple(
            picture
            for comparison, suffix in zip(comparisons, suffixes, strict=True)
            for picture in _frontiers(comparison, suffix)
        ),
        bars=tuple(
            entry
            for comparison, suffix in zip(comparisons, suffixes, strict=True)
            for entry in _compared_bars(comparison, suffix)
        ),
    )
    return _rendered(page)


def _names(comparison: Comparison) -> Sequence[str]:
    return short_names([artifact.folder for artifact in comparison.artifacts])


def _frontiers(comparison: Comparison, suffix: str) -> Iterable[Scatter]:
    """KL divergence beside size and beside the time of a token, of comparable artifacts."""
    for key, title, axis, unit in (
        ("size_bytes", "Size", "size, MB", "MB"),
        ("decode_ms_per_token", "Time of a token", "decode, ms per token", "ms"),
    ):
        points = [
            Point(
                x=artifact.values[key] / (1e6 if unit == "MB" else 1),
                y=artifact.values["kl_divergence"],
                label=name,
                description=f"{name}\n{artifact.scheme} for {artifact.target}\n"
                f"{METRICS[key].show(artifact.values[key])} {unit}, "
                f"KL {artifact.values['kl_divergence']:.3g}",
            )
            for name, artifact in zip(_names(comparison), comparison.artifacts, strict=True)
            if {key, "kl_divergence"} <= artifact.values.keys()
            and not {key, "kl_divergence"} & artifact.not_compared.keys()
        ]
        if len(points) > 1:
            yield scatter(f"{title} and KL divergence{suffix}", (axis, "KL divergence, nats"), points)


def _compared_bars(comparison: Comparison, suffix: str) -> Iterable[Bars]:
    for key in ("size_bytes", "prefill_ms", "decode_ms_per_token", "run_peak_bytes"):
        title = METRICS[key].title
        bars = bars_of(
            title + suffix,
            ("artifact", title),
            [
                (name, artifact.values[key], METRICS[key].show(artifact.values[key]))
                for name, artifact in zip(_names(comparison), comparison.artifacts, strict=True)
                if key in artifact.values and key not in artifact.not_compared
            ],
        )
        if bars and len(bars.bars) > 1:
            yield bars


def _rendered(page: WebPage) -> str:
    from jinja2 import Environment, StrictUndefined

    source = TEMPLATE.read_text(encoding="utf-8")
    (script,) = re.findall(r"<script>(.*?)</script>", source, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.from_string(source).render(page=page, script_hash=digest)


def _summary(document: Json) -> Iterable[str]:
    """The facts of the verdict's line."""
    yield f"{document['size']['ratio']:.2g}x the size"
    yield from (f"{phase} {ratio:.2g}x as fast" for phase, ratio in _speeds(document))
    accuracy, similarity = document.get("accuracy"), document.get("similarity")
    if accuracy and "kl_divergence" in accuracy:
        perplexity = accuracy["perplexity"]
        increase, error = (100 * perplexity[key] for key in ("increase", "increase_standard_error"))
        yield f"KL divergence {accuracy['kl_divergence']:.3g} ± {accuracy['kl_standard_error']:.1g} nats"
        yield f"perplexity {increase:+.2f} ± {error:.2f}%"
    if similarity:
        yield from (f"{figure.name} {figure.value}" for figure in head_figures(similarity))
        if shows_vectors(similarity):
            yield f"error of outputs {similarity['relative_rms_error']:.2%}"
            yield f"mean cosine {similarity['mean_cosine']:.5f}"
    search = document.get("search")
    if search:
        yield f"budget: {budget_line(search)}"


def _speeds(document: Json) -> Iterable[tuple[str, float]]:
    """(phase, time of the reference over that of the artifact) on the first provider."""
    for entry in document.get("latency", ())[:1]:
        for key, phase, _ in reversed(PHASES):
            if key in entry and key in entry.get("reference", {}):
                yield phase, entry["reference"][key] / entry[key]


def _tiles(document: Json) -> Iterable[Tile]:
    size = document["size"]
    yield Tile(
        name="Size",
        value=megabytes(size["artifact_bytes"]),
        unit="MB",
        detail=f"{size['ratio']:.2g}x of {megabytes(size['source_bytes'])} MB",
    )
    for entry in document.get("latency", ())[:1]:
        for key, phase, unit in reversed(PHASES):
            reference = entry.get("reference", {}).get(key)
            if key in entry:
                beside = f"{figures(reference)} in float32" if reference else entry["provider"]
                yield Tile(name=phase.capitalize(), value=figures(entry[key]), unit=unit, detail=beside)
    accuracy, similarity = document.get("accuracy"), document.get("similarity")
    if accuracy and "kl_divergence" in accuracy:
        yield Tile(
            name="KL divergence",
            value=f"{accuracy['kl_divergence']:.2g}",
            unit="nats",
            detail=f"99th percentile {accuracy['kl_99th_percentile']:.2g}",
        )
        yield Tile(
            name="Top-1",
            value=f"{accuracy['top1_agreement']:.2%}",
            detail=f"{accuracy['protocol']['num_tokens']:,} tokens",
        )
    for figure in head_figures(similarity or {}):
        name = figure.name if figure.name[1].isupper() else figure.name.capitalize()  # nDCG, KL
        yield Tile(name=name, value=figure.value, detail=figure.compared)
    if similarity and shows_vectors(similarity):
        windows = "pictures" if similarity.get("of_pictures") else "windows"
        yield Tile(
            name="Error of outputs",
            value=f"{similarity['relative_rms_error']:.2%}",
            detail=f"{similarity['num_windows']} {windows} of {similarity['window']} tokens",
        )
        yield Tile(
            name="Mean cosine",
            value=f"{similarity['mean_cosine']:.5f}",
            detail=f"lowest {similarity['lowest_cosine']:.5f}",
        )


def _kept_lines(document: Json) -> Iterable[str]:
    for entry in document.get("kept", ()):
        yield f"not quantized: {entry['count']} {entry['role']} ({entry['reason']})"


def _search_picture(search: Json | None) -> Scatter | None:
    """Size against KL divergence of all configurations that the search measured."""
    if not search or len(search["candidates"]) < 2:
        return None
    chosen = search["chosen"]["choices"]
    points = [
        Point(
            x=candidate["num_bytes"] / 1e6,
            y=candidate["loss"]["kl_divergence"],
            label=candidate["label"],
            description=f"{candidate['label']}{', chosen' if candidate['choices'] == chosen else ''}\n"
            f"{formats_text(candidate)}\n"
            f"{megabytes(candidate['num_bytes'])} MB of projections\n"
            f"KL divergence {candidate['loss']['kl_divergence']:.3g}\n"
            f"perplexity {candidate['loss']['ppl_increase']:+.2%}\n"
            f"top-1 agreement {candidate['loss']['top1_agreement']:.2%}",
            is_chosen=candidate["choices"] == chosen,
        )
        for candidate in search["candidates"]
    ]
    limit = (search["max_kl"], f"budget {search['max_kl']:g}") if "max_kl" in search else None
    names = ("projections, MB", "KL divergence, nats")
    return scatter("Size and KL divergence of the search", names, points, limit=limit)


def _bars(document: Json) -> Iterable[Bars | None]:
    for key, phase, unit in PHASES:
        yield _latency_bars(document.get("latency", ()), key, phase, unit)
    parts = document["size"].get("parts", ())
    yield bars_of(
        "Where the bytes go",
        ("part", "MB"),
        [(part["name"], part["num_bytes"], megabytes(part["num_bytes"])) for part in parts],
    )
    seconds = document.get("seconds", {})
    yield bars_of(
        "Time of the stages of this run",
        ("stage", "seconds"),
        [(stage, spent, figures(spent)) for stage, spent in seconds.items()],
    )


def _latency_bars(entries: Sequence[Json], key: str, phase: str, unit: str) -> Bars | None:
    rows, references, marks = [], [], {}
    for entry in entries:
        provider = entry["provider"].removesuffix("ExecutionProvider")
        reference = entry.get("reference", {}).get(key)
        if reference is not None:
            rows.append((f"float32, {provider}", reference, figures(reference)))
            references.append(f"float32, {provider}")
        if key in entry:
            rows.append((f"artifact, {provider}", entry[key], figures(entry[key])))
            if "decode" in key and "floor_ms_per_token" in entry:
                marks[f"artifact, {provider}"] = entry["floor_ms_per_token"]
    floor = "; ".join(figures(value) for value in marks.values())
    return bars_of(
        f"Latency of {phase}",
        ("model", unit),
        rows,
        references=references,
        marks=marks,
        note=f"The line marks the memory floor: {floor} {unit} to read weights and cache once."
        if marks
        else "",
    )
