"""Lines and tables on rounding: losses of each pack, gains of fit and smoothing, and the search for a budget.

A pack is the projections that one MatMul computes. The page shows the packs that lose most; report.json
holds all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from quantkit.plan.formats import FLOAT
from quantkit.report.ffn import units_table
from quantkit.report.figures import figures, megabytes
from quantkit.report.tables import Cells, Json, Page, Table, table_of

MOST_ROWS = 8
PLAIN_FIT = "rtn"


def loss_lines(document: Json) -> Iterable[str]:
    """Transforms, fit, smoothing and search, a line each."""
    if document.get("transforms"):
        yield f"transforms: {', '.join(document['transforms'])} (exact before rounding)"
    losses = document.get("layer_losses", [])
    if document.get("fit", PLAIN_FIT) != PLAIN_FIT and losses:
        yield f"fit: {document['fit']}; {_gain(losses)}{_fallback(losses)}"
    smoothing = document.get("smoothing", [])
    if smoothing:
        count = sum(space.get("alpha") is not None for space in smoothing)
        plain, error = (sum(space[key] for space in smoothing) for key in ("plain_error", "error"))
        share = f"; squared error {error / plain:.0%} of that without" if plain else ""
        yield f"smoothing: {count} of {len(smoothing)} spaces{share}"
    search = document.get("search")
    if search:
        yield f"budget: {budget_line(search)}; {_choice(search)}"


def loss_tables(document: Json) -> Iterable[Table]:
    """Losses of packs, configurations of a search and times of shapes, where there are any."""
    for key, table in (("layer_losses", _losses), ("search", _candidates), ("shape_times", _times)):
        if document.get(key):
            yield table(document[key])


def sensitivity_page(model: str, packs: Sequence[Json], protocol: str) -> Page:
    """The page of `quantkit inspect --sensitivity`: every pack, those that lose most first."""
    formats = tuple(option["format"] for option in packs[0]["options"] if option["format"] != FLOAT)

    def losses(pack: Json) -> list[float]:
        loss_of = {option["format"]: float(option["loss"]) for option in pack["options"]}
        return [loss_of[name] for name in formats]

    def cells(name: str, values: Iterable[float]) -> tuple[str, ...]:
        return (name, *(f"{value:.3g}" for value in values))

    ordered = sorted(packs, key=lambda pack: -max(losses(pack)))
    total = [sum(values) for values in zip(*map(losses, packs), strict=True)]
    rows = (cells("sum of all packs", total), *(cells(pack["name"], losses(pack)) for pack in ordered))
    tables = [Table(title="Sensitivity", columns=("pack", *formats), rows=rows, numeric=formats)]
    foot = [protocol]
    ffns = [pack["ffn"] for pack in ordered if "ffn" in pack]
    if ffns:
        tables.append(units_table(ffns, "Hidden units of the float model, in the same order"))
        foot.append("'quantkit inspect --ffn' explains the columns of hidden units")
    head = f"{model}: KL divergence in nats with one pack in a format and all others in float"
    return Page(head=(head,), tables=tuple(tables), foot=tuple(foot))


def _gain(losses: Iterable[Json]) -> str:
    """The median error, relative to round-to-nearest."""
    has_outputs = all("output_error" in loss for loss in losses)
    key, what = ("output_error", "outputs") if has_outputs else ("weight_error", "weights")
    ratios = sorted(loss[key] / loss[f"plain_{key}"] for loss in losses if loss[f"plain_{key}"])
    median = ratios[len(ratios) // 2] if ratios else 1.0
    return f"error of {what} {median:.2f}x that of round-to-nearest (median of {len(ratios)} packs)"


def _fallback(losses: Iterable[Json]) -> str:
    """The packs of which rows are rounded to nearest, since the fit lost more on held-out tokens."""
    count = sum("output_error" in loss and loss.get("plain_share", 0.0) > 0 for loss in losses)
    return f"; {count} rounded to nearest, where the fit loses more on held-out tokens" if count else ""


def scheme_text(document: Json) -> str:
    """The scheme, or the formats that a search chose in its place."""
    search = document.get("search")
    return f"{formats_text(search['chosen'])} (searched)" if search else str(document["scheme"])


def formats_text(candidate: Json) -> str:
    """The formats of a configuration of the search, the most frequent first."""
    counts = Counter(name for _, name in candidate["choices"]).most_common()
    return ", ".join(f"{count} x {name}" for name, count in counts)


def budget_line(search: Json) -> str:
    """Every limit, and whether it is held."""
    size = f"size within {megabytes(search['max_bytes'])} MB, held" if "max_bytes" in search else ""
    loss = _loss_limits(search)
    return "; ".join(filter(None, (loss and f"{loss}, {'held' if search['holds'] else 'NOT held'}", size)))


def _loss_limits(search: Json) -> str:
    limits = []
    if search.get("max_ppl_increase") is not None:
        limits.append(f"perplexity within {search['max_ppl_increase']:+.2%}")
    if search.get("max_kl") is not None:
        limits.append(f"KL divergence within {search['max_kl']:g}")
    return " and ".join(limits)


def _choice(search: Json) -> str:
    num_models = len(search["candidates"]) + len(search["verdicts"])
    return f"{num_models} models measured; chosen: {formats_text(search['chosen'])}"


def _losses(losses: Sequence[Json]) -> Table:
    shown = {
        "weight_error": "weights",
        "output_error": "outputs",
        "kl_divergence": "KL, alone",
    }
    keys = [key for key in shown if key == "weight_error" or any(key in loss for loss in losses)]
    worst = sorted(losses, key=lambda loss: -loss.get(keys[-1], 0.0))[:MOST_ROWS]
    numeric = tuple(shown[key] for key in keys)
    return Table(
        title=f"Largest relative errors ({len(worst)} of {len(losses)} packs; round-to-nearest in brackets)",
        columns=("pack", "format", *numeric),
        rows=tuple(
            (loss["name"], loss["format"], *(_loss_cell(loss, key) for key in keys)) for loss in worst
        ),
        numeric=numeric,
        whole=("pack",),
    )


def _loss_cell(loss: Json, key: str) -> str:
    if key not in loss:
        return "-"
    if key == "kl_divergence":
        return f"{loss[key]:.2g}"
    plain = loss[f"plain_{key}"]
    return f"{loss[key]:.2%}" if plain == loss[key] else f"{loss[key]:.2%} ({plain:.2%})"


def _candidates(search: Json) -> Table:
    chosen = search["chosen"]["choices"]
    cells: Cells = {
        "configuration": lambda row: f"{row['label']}{' <- chosen' if row['choices'] == chosen else ''}",
        "MB": lambda row: megabytes(row["num_bytes"]),
        "us/token": lambda row: figures(row["microseconds"]) if "microseconds" in row else "-",
        "perplexity": lambda row: f"{row['loss']['ppl_increase']:+.2%}",
        "KL": lambda row: f"{row['loss']['kl_divergence']:.3g}",
        "top-1": lambda row: f"{row['loss']['top1_agreement']:.2%}",
        "predicted KL": lambda row: f"{row['predicted_kl']:.3g}",
    }
    candidates = sorted(search["candidates"], key=lambda candidate: float(candidate["cost"]))
    title = "Configurations of the search (projections alone, on text held out from calibration)"
    return table_of(title, candidates, cells)


def _times(times: Sequence[Json]) -> Table:
    cells: Cells = {
        "format": lambda time: str(time["format_name"]),
        "in": lambda time: f"{time['in_features']}",
        "out": lambda time: f"{time['out_features']}",
        "rows": lambda time: f"{time['rows']}",
        "median us": lambda time: figures(time["median_us"]),
        "spread us": lambda time: figures(time["spread_us"]),
    }
    return table_of("Times of single MatMuls on this machine", times, cells)
