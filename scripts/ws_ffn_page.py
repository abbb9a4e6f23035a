"""The page of scripts/train_ws_ffn.py: tables, and its curves as an SVG that needs no library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, MARGIN = 640, 320, 48
COLOURS = {"with losses": "#1f77b4", "without losses": "#d62728"}
BARS = {"increase": 0.005, "kl_divergence": 0.003, "top1_agreement": 0.965}


def write_page(document: dict[str, Any], folder: Path) -> None:
    """docs/benchmarks/ws-ffn.md and .svg from the figures."""
    runs, sizes, machine = document["runs"], document["sizes"], document["machine"]
    width = sizes["intermediate_size"] // sizes["num_latent_heads"]
    chance = (2 / math.pi / width) ** 0.5  # the mean of |cosine|, for many dimensions
    (folder / "ws-ffn.svg").write_text(curves(runs), encoding="utf-8")
    lines = [
        "# wsFFN, trained with its losses and without",
        "",
        f"Made by `scripts/train_ws_ffn.py`: {sizes['num_hidden_layers']} blocks of {sizes['hidden_size']}, "
        f"FFN {sizes['intermediate_size']} with {sizes['num_latent_heads']} latent heads, "
        f"{document['steps']} steps of {sizes['batch']} x {sizes['length']} tokens from "
        f"{document['training_tokens']:,} tokens of the demo's calibration split, seed {document['seed']}.",
        "Held out: windows of the bundled evaluation text. "
        f"{machine['processor']}, threads: {machine['threads']}, torch {machine['torch']}, "
        f"{machine['date']}. [All figures](ws-ffn.json)",
        "",
        "![losses](ws-ffn.svg)",
        "",
        *table(
            (
                "step",
                *(f"{kind}, {name}" for name in runs for kind in ("training", "held out")),
                "FFN losses",
                "z",
            ),
            loss_rows(runs),
        ),
        "",
        "Losses in nats a token; training losses are means since the row before. Those of the FFN are",
        "summed over blocks, z is read from detached logits. Without them the latents are never computed.",
        "",
        "## What the losses do to the heads",
        "",
        *table(("mean absolute cosine", "start", *runs), similarity_rows(runs)),
        "",
        "Of a window, the mean over its tokens is compared, which is what the contrastive loss reads.",
        f"Random vectors of {width} have {chance:.4f}: heads that start block-diagonal are as far apart as",
        "that from the first step on. What is left for the loss is what one head makes of different windows.",
        "",
        *table(
            ("squared latent weights off the diagonal", *runs),
            [("at the end of training", *(f"{100 * each['drift']:.4g}%" for each in runs.values()))],
        ),
        "",
        "## Finetuning without the losses",
        "",
        *table(
            ("a training step", "median ms", "beside the plain one"),
            [
                (name, f"{each['median_ms']:.1f}", f"{each['ratio']:.3f}")
                for name, each in document["finetuning"].items()
            ],
        ),
        "",
        "One step of each in turn, in alternating order; the last column is the median of the turns' ratios.",
        "",
        "## INT8, as `quantkit quantize` makes it",
        "",
        *table(
            (
                "trained",
                "latents",
                "projections",
                "perplexity",
                "INT8",
                "change",
                "KL",
                "top-1",
                "bars",
                "MB",
            ),
            [row for name, each in runs.items() for row in int8_rows(name, each["quantized"])],
        ),
        "",
        f"Bars: perplexity within +{BARS['increase']:.1%}, KL divergence at most {BARS['kl_divergence']}, "
        f"the same likeliest token at {BARS['top1_agreement']:.1%} of tokens or more.",
        "",
    ]
    (folder / "ws-ffn.md").write_text("\n".join(lines), encoding="utf-8")


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Markdown, figures to the right."""
    head = ["| " + " | ".join(columns) + " |", "|---" + "|---:" * (len(columns) - 1) + "|"]
    return head + ["| " + " | ".join(row) + " |" for row in rows]


def loss_rows(runs: dict[str, Any]) -> list[list[str]]:
    """One row a point of the curves."""
    rows = []
    for points in zip(*(each["curve"] for each in runs.values()), strict=True):
        row = [str(points[0]["step"])]
        for point in points:
            row += [f"{point['main']:.3f}" if "main" in point else "", f"{point['held_out']:.3f}"]
        first = points[0]
        row += [f"{first[name]:.5f}" if name in first else "" for name in ("wsffn_aux", "z")]
        rows.append(row)
    return rows


def similarity_rows(runs: dict[str, Any]) -> list[list[str]]:
    """At the start, which is the same, and at the end of each run."""
    start = next(iter(runs.values()))["similarity"]["start"]
    return [
        [
            kind,
            f"{start[kind]:.4f}",
            *(f"{each['similarity']['end'][kind]:.4f}" for each in runs.values()),
        ]
        for kind in start
    ]


def int8_rows(name: str, quantized: dict[str, Any]) -> list[list[str]]:
    """One row for each way to quantize a model."""
    rows = []
    for kind, each in quantized.items():
        accuracy, counts = each["accuracy"], each["projections"]
        perplexity = accuracy["perplexity"]
        figures = {
            "increase": perplexity["increase"],
            "kl_divergence": accuracy["kl_divergence"],
            "top1_agreement": accuracy["top1_agreement"],
        }
        holds = all(
            figures[bar] >= limit if bar == "top1_agreement" else figures[bar] <= limit
            for bar, limit in BARS.items()
        )
        rows.append(
            [
                name,
                "kept" if kind != "default" else "left out",
                f"{counts['quantized']} of {counts['total']}",
                f"{perplexity['reference']:.2f}",
                f"{perplexity['quantized']:.2f}",
                f"{figures['increase']:+.2%}",
                f"{figures['kl_divergence']:.5f}",
                f"{figures['top1_agreement']:.2%}",
                "held" if holds else "MISSED",
                f"{each['size']['artifact_bytes'] / 1e6:.2f}",
            ]
        )
    return rows


def curves(runs: dict[str, Any]) -> str:
    """Held-out losses as lines, training losses dashed."""
    series = [
        (name, kind, [(point["step"], point[key]) for point in each["curve"] if key in point])
        for name, each in runs.items()
        for kind, key in (("held out", "held_out"), ("training", "main"))
    ]
    places = [place for _, _, points in series for place in points]
    last, low, high = (
        max(place[0] for place in places) or 1,
        min(place[1] for place in places),
        max(place[1] for place in places),
    )

    def at(place: tuple[float, float]) -> str:
        x = MARGIN + place[0] / last * (WIDTH - 2 * MARGIN)
        y = HEIGHT - MARGIN - (place[1] - low) / ((high - low) or 1) * (HEIGHT - 2 * MARGIN)
        return f"{x:.1f},{y:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<path d="M{MARGIN},{MARGIN} V{HEIGHT - MARGIN} H{WIDTH - MARGIN}" fill="none" stroke="black"/>',
        f'<text x="{WIDTH - MARGIN}" y="{HEIGHT - MARGIN + 28}" text-anchor="end">step {last}</text>',
        f'<text x="{MARGIN - 6}" y="{HEIGHT - MARGIN}" text-anchor="end">{low:.2f}</text>',
        f'<text x="{MARGIN - 6}" y="{MARGIN + 4}" text-anchor="end">{high:.2f}</text>',
        f'<text x="{MARGIN}" y="{MARGIN - 14}">loss, nats a token</text>',
    ]
    for number, (name, kind, points) in enumerate(series):
        dash = ' stroke-dasharray="5 4"' if kind == "training" else ""
        line = f'fill="none" stroke="{COLOURS.get(name, "black")}" stroke-width="2"{dash}'
        y = MARGIN + 16 * number
        parts.append(f'<polyline points="{" ".join(at(place) for place in points)}" {line}/>')
        parts.append(f'<path d="M{WIDTH - 220},{y} h28" {line}/>')
        parts.append(f'<text x="{WIDTH - 184}" y="{y + 4}">{name}, {kind}</text>')
    return "\n".join([*parts, "</svg>", ""])
