"""What `protect` prints: both sides of a model, or how an attack on one went."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantkit.errors import InputError
from quantkit.model.model_map import to_json
from quantkit.private.files import CLIENT, HOST
from quantkit.recipe import Recipe, override

NO_TRANSFORM = "none"


def protect(
    *,
    model: str,
    key: Path,
    output: Path | None,
    settings: Mapping[str, Any],
    permutes: str,
    force: bool,
    as_json: bool,
) -> str:
    """Write both sides, and say what was written and how it is run."""
    from quantkit.private.protect import protect as split

    if output is None:
        raise InputError("nowhere to write to", where="protect", next_step="choose a folder with -o DIR")
    made = split(
        recipe_of(model, settings),
        key_file=key,
        output=output,
        permutes=names_of(permutes),
        force=force,
        quiet=as_json,
    )
    if as_json:
        return json.dumps({**to_json(made), "folder": str(made.folder), "key_file": str(key)}, indent=2)
    width = made.bytes_per_token
    sides = {side: _side(made.num_planned[side], made.num_bytes[side]) for side in (HOST, CLIENT)}
    lines = [
        f"made the key {key} (mode 0600): keep a copy, and keep it to yourself" if made.makes_key else "",
        f"{made.folder / HOST}: {sides[HOST]}; give this to whoever computes",
        f"{made.folder / CLIENT}: {sides[CLIENT]}; as secret as the key",
        f"permuted: {', '.join(made.permutes)}; {made.scheme}; {width:,} bytes a token each way",
        "this hides features from a look, not from an attack with the public weights: "
        "docs/private-inference.md, --audit",
        "",
        f"next: quantkit serve-host {made.folder / HOST} --port 8377",
        f'      quantkit generate {made.folder / CLIENT} --host http://127.0.0.1:8377 "The king"',
    ]
    return "\n".join(line for number, line in enumerate(lines) if line or number == 5)


def _side(num_projections: int, num_bytes: int) -> str:
    """Its projections, all of them as planned, and its size."""
    plural = "" if num_projections == 1 else "s"
    return f"{num_projections} INT8 projection{plural}, {num_bytes / 1e6:.1f} MB"


def audit(
    *, model: str, host: Path, key: Path, settings: Mapping[str, Any], permutes: str, as_json: bool
) -> str:
    """How much of the key's orders an attacker with the public weights recovers."""
    from quantkit.private.audit import audit as attack
    from quantkit.report.protection import audit_page
    from quantkit.report.tables import print_page

    found = attack(recipe_of(model, settings), host=host, key_file=key, permutes=names_of(permutes))
    document = to_json(found)
    if as_json:
        return json.dumps(document, indent=2)
    print_page(audit_page(document))
    return ""


def recipe_of(model: str, settings: Mapping[str, Any]) -> Recipe:
    """The recipe that these flags come to."""
    changes = {name: value for name, value in settings.items() if value is not None}
    transforms = changes.get("transforms")
    if transforms:
        changes["transforms"] = [] if transforms == [NO_TRANSFORM] else transforms
    return override(Recipe(model=model), changes)


def names_of(text: str) -> tuple[str, ...]:
    """Names between commas."""
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
