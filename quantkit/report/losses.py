"""What rounding took from each product, what a better fit gave back, and what a search tried.

The page shows the products that lose most; report.json has them all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from quantkit.plan.formats import FLOAT
from quantkit.report.ffn import units_table
from quantkit.report.figures import figures, megabytes
from quantkit.report.tables import Page, Table

MOST_ROWS = 8
PLAIN_FIT = "rtn"
Json = Mapping[str, Any]


def loss_head(document: Json) -> Iterable[str]:
    """How the weights were fitted, in a line or two."""
    if document.get("transforms"):
        yield f"transforms: {', '.join(document['transforms'])}, exact before rounding"
    losses = document.get("layer_losses", [])
    if document.get("fit", PLAIN_FIT) != PLAIN_FIT and losses:
        yield f"fit: {document['fit']}; {_gain(losses)}"
    smoothing = document.get("smoothing", [])
    if smoothing:
        smoothed = [each for each in smoothing if each.get("alpha") is not None]
        plain, error = (sum(each[key] for each in smoothing) for key in ("plain_error", "error"))
        share = f", which leaves {error / plain:.0%} of their squared error" if plain else ""
        yield f"smoothed: {len(smoothed)} of {len(smoothing)} spaces{share}"
    search = document.get("search")
    if search:
        yield f"budget: {_limits(search)}, {'held' if search['holds'] else 'NOT held'}; {_chosen(search)}"


def _gain(losses: Iterable[Json]) -> str:
    """The median of what is left of plain rounding's error."""
    key = "output_error" if all("output_error" in each for each in losses) else "weight_error"
    shares = sorted(each[key] / each[f"plain_{key}"] for each in losses if each[f"plain_{key}"])
    what = "outputs" if key == "output_error" else "weights"
    middle = shares[len(shares) // 2] if shares else 1.0
    return f"error of {what} {middle:.2f}x that of plain rounding (median of {len(shares)} products)"


def _limits(search: Json) -> str:
    parts = []
    if search.get("max_ppl_increase") is not None:
        parts.append(f"perplexity within {search['max_ppl_increase']:+.2%}")
    if search.get("max_kl") is not None:
        parts.append(f"KL divergence within {search['max_kl']:g}")
    return " and ".join(parts)


def _chosen(search: Json) -> str:
    counts: dict[str, int] = {}
    for _, name in search["chosen"]["choices"]:
        counts[name] = counts.get(name, 0) + 1
    mix = ", ".join(f"{count} {name}" for name, count in sorted(counts.items(), key=lambda each: -each[1]))
    tried = len(search["candidates"]) + len(search["verdicts"])
    return f"{tried} models measured; chosen: {mix}"


def loss_alarms(document: Json) -> Iterable[str]:
    """A budget that could not be held."""
    search = document.get("search")
    if search and search["holds"] and not document["projections"]["quantized"]:
        yield "NOTHING QUANTIZED: only the model as it was holds this budget"
    if search and not search["holds"]:
        verdict = search["verdicts"][-1]
        yield (
            f"BUDGET MISSED: perplexity {verdict['ppl_increase']:+.2%}, KL divergence "
            f"{verdict['kl_divergence']:.3g} on unseen text; this is the best that was found"
        )


def loss_tables(document: Json) -> Iterable[Table]:
    """The products that lose most, and the configurations that a search measured."""
    losses = document.get("layer_losses", [])
    if losses:
        yield _products(losses)
    search = document.get("search")
    if search:
        yield _candidates(search)
    times = document.get("shape_times", [])
    if times:
        yield _times(times)


def sensitivity_page(model: str, units: Sequence[Json], protocol: str) -> Page:
    """What `quantkit inspect --sensitivity` shows: every product, those that lose most first."""
    names = [each["format"] for each in units[0]["options"] if each["format"] != FLOAT]

    def loss(unit: Json, name: str) -> float:
        return next(float(each["loss"]) for each in unit["options"] if each["format"] == name)

    ordered = sorted(units, key=lambda unit: -max(loss(unit, name) for name in names))
    total = ("all, if losses add up", *(f"{sum(loss(unit, name) for unit in units):.3g}" for name in names))
    rows = [(unit["name"], *(f"{loss(unit, name):.3g}" for name in names)) for unit in ordered]
    ffns = [unit["ffn"] for unit in ordered if "ffn" in unit]
    return Page(
        head=(f"{model}: KL divergence in nats when one product alone is in a format",),
        tables=(
            Table(
                title="Sensitivity", columns=("product", *names), rows=(total, *rows), numeric=tuple(names)
            ),
            *([units_table(ffns, "Hidden units of the original, in the same order")] if ffns else []),
        ),
        foot=(protocol, *(("'quantkit inspect --ffn' says what their columns mean",) if ffns else ())),
    )


def _products(losses: list[Json]) -> Table:
    has_outputs = any("output_error" in each for each in losses)
    has_kl = any("kl_divergence" in each for each in losses)
    key = "kl_divergence" if has_kl else "output_error" if has_outputs else "weight_error"
    worst = sorted(losses, key=lambda each: -each.get(key, 0.0))[:MOST_ROWS]
    numeric = ("weights", *(("outputs",) if has_outputs else ()), *(("KL alone",) if has_kl else ()))
    rows = []
    for each in worst:
        row = [each["name"], each["format"], _beside(each, "weight_error")]
        row += [_beside(each, "output_error")] if has_outputs else []
        row += [f"{each['kl_divergence']:.2g}" if "kl_divergence" in each else "-"] if has_kl else []
        rows.append(tuple(row))
    return Table(
        title=f"Products that lose most ({len(worst)} of {len(losses)}; errors, of plain rounding behind)",
        columns=("product", "format", *numeric),
        rows=tuple(rows),
        numeric=numeric,
    )


def _beside(each: Json, key: str) -> str:
    if key not in each:
        return "-"
    plain = each[f"plain_{key}"]
    return f"{each[key]:.2%}" if plain == each[key] else f"{each[key]:.2%} ({plain:.2%})"


def _candidates(search: Json) -> Table:
    numeric = ("MB", "us/token", "perplexity", "KL", "same top-1", "KL expected")
    chosen = search["chosen"]["choices"]
    rows = []
    for each in sorted(search["candidates"], key=lambda each: each["cost"]):
        loss = each["loss"]
        rows.append(
            (
                f"{each['label']}{' <- chosen' if each['choices'] == chosen else ''}",
                megabytes(each["num_bytes"]),
                figures(each["microseconds"]) if "microseconds" in each else "-",
                f"{loss['ppl_increase']:+.2%}",
                f"{loss['kl_divergence']:.3g}",
                f"{loss['top1_agreement']:.2%}",
                f"{each['predicted_kl']:.3g}",
            )
        )
    return Table(
        title="Configurations measured (of projections alone, on text held back from calibration)",
        columns=("configuration", *numeric),
        rows=tuple(rows),
        numeric=numeric,
    )


def _times(times: list[Json]) -> Table:
    numeric = ("in", "out", "rows", "median us", "spread us")
    return Table(
        title="Times of single products on this machine",
        columns=("format", *numeric),
        rows=tuple(
            (
                each["format_name"],
                f"{each['in_features']}",
                f"{each['out_features']}",
                f"{each['rows']}",
                figures(each["median_us"]),
                figures(each["spread_us"]),
            )
            for each in times
        ),
        numeric=numeric,
    )
