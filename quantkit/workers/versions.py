"""Versions of the libraries that decide an artifact, equal on all hosts that work on it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version

from quantkit.errors import InputError
from quantkit.runtime.manifest import HASHED_PACKAGES


def installed_versions() -> dict[str, str]:
    return {name: version(name) for name in HASHED_PACKAGES}


def require_versions(expected: Mapping[str, str], *, host: str) -> None:
    """Refuse a host whose libraries differ from the driver's: its results would not belong to them."""
    installed = installed_versions()
    differences = [
        f"{name} {installed.get(name)} instead of {wanted}"
        for name, wanted in expected.items()
        if installed.get(name) != wanted
    ]
    if differences:
        raise InputError(
            f"other versions than the driver's: {', '.join(differences)}",
            where=f"host {host}",
            next_step="install the driver's versions there",
        )
