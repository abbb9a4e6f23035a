"""An artifact's size and KL divergence beside those of the schemes, as measured on a released model.

The model is another one, so its points show what schemes cost and not what this artifact could be. Sizes are
shares of the model in float32. A test holds the figures of the asset to docs/benchmarks/real.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quantkit.report.figures import megabytes
from quantkit.report.pictures import Point, Scatter, frontier, scatter
from quantkit.report.tables import Json

ASSET = Path(__file__).parents[1] / "assets" / "known_points.json"
FLOAT_BYTES = 4


def known_points_picture(document: Json) -> Scatter | None:
    """None where no KL divergence or no float graph was measured."""
    accuracy, size = document.get("accuracy", {}), document["size"]
    kl, float_bytes = accuracy.get("kl_divergence"), size.get("reference_bytes")
    if not kl or not float_bytes or document.get("has_random_weights"):
        return None
    known: dict[str, Any] = json.loads(ASSET.read_text(encoding="utf-8"))
    total = FLOAT_BYTES * known["num_parameters"]
    schemes = [
        _point(name, known["model"], row["bytes"], total, row["kl_divergence"])
        for name, row in known["schemes"].items()
    ]
    own = _point("this artifact", document["model"], size["artifact_bytes"], float_bytes, kl, is_own=True)
    return scatter(
        "Size and KL divergence beside the schemes",
        ("size, share of float32", "KL divergence, nats"),
        [*schemes, own],
        note=f"the full point is this artifact; rings are schemes as measured on {known['model']} "
        f"({known['text']}); the line joins those that no other beats in both. "
        "Models differ in what they lose.",
        line=frontier(schemes),
    )


def _point(
    name: str, model: str, num_bytes: float, float_bytes: float, kl: float, *, is_own: bool = False
) -> Point:
    return Point(
        x=num_bytes / float_bytes,
        y=kl,
        label=name,
        description=f"{name}\n{model}: {megabytes(num_bytes)} MB, {num_bytes / float_bytes:.3f} of float32\n"
        f"KL divergence {kl:.3g}",
        is_chosen=is_own,
        is_labelled=is_own,
    )
