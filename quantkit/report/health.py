"""The page of `quantkit doctor`: processor, memory, execution providers and checks of this machine."""

from __future__ import annotations

from typing import Any

from quantkit.report.tables import Page, Table

GIB = 1 << 30


def health_page(diagnosis: dict[str, Any]) -> Page:
    """The page, from the JSON form of a diagnosis."""
    cpu, memory = diagnosis["cpu"], diagnosis["memory"]
    features = ", ".join(name for name, present in cpu["features"].items() if present)
    packages = ", ".join(
        f"{name} {version}" for name, version in diagnosis["packages"].items() if version is not None
    )
    providers = tuple(
        (
            provider["name"],
            "yes" if provider["usable"] else "no",
            ", ".join(provider["devices"]) or provider["why_not"] or "-",
        )
        for provider in diagnosis["providers"]
    )
    checks = tuple(
        (check["name"], check["status"], " -> ".join(filter(None, (check["message"], check["cure"]))))
        for check in diagnosis["checks"]
    )
    return Page(
        head=(
            f"quantkit {diagnosis['quantkit_version']}, Python {diagnosis['python_version']}, "
            f"{diagnosis['platform']}",
            f"packages: {packages}",
            f"CPU: {cpu['model']}, {cpu['usable_cores']:g} usable of {cpu['logical_cores']} logical cores; "
            f"{features}",
            f"memory: {memory['available_bytes'] / GIB:.1f} of {memory['total_bytes'] / GIB:.1f} GiB free; "
            f"disk: {diagnosis['free_disk_bytes'] / GIB:.1f} GiB free",
        ),
        tables=(
            Table(
                title="Execution providers",
                columns=("provider", "usable", "devices or reason"),
                rows=providers,
            ),
            Table(title="Checks", columns=("check", "status", "result -> remedy"), rows=checks),
        ),
    )
