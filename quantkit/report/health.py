"""The page of `quantkit doctor`."""

from __future__ import annotations

from typing import Any

from quantkit.report.tables import Page, Table

GIB = 1 << 30


def health_page(diagnosis: dict[str, Any]) -> Page:
    """What this machine has, and what is wrong with it, each with its cure; reads the JSON form."""
    cpu, memory = diagnosis["cpu"], diagnosis["memory"]
    features = [name for name, present in cpu["features"].items() if present]
    packages = ", ".join(
        f"{name} {version}" for name, version in diagnosis["packages"].items() if version is not None
    )
    return Page(
        head=(
            f"quantkit {diagnosis['quantkit_version']}, Python {diagnosis['python_version']}, "
            f"{diagnosis['platform']}",
            f"packages: {packages}",
            f"CPU: {cpu['model']}, {cpu['usable_cores']:g} usable of {cpu['logical_cores']} logical cores; "
            f"{', '.join(features)}",
            f"memory: {memory['available_bytes'] / GIB:.1f} of {memory['total_bytes'] / GIB:.1f} GiB free; "
            f"disk: {diagnosis['free_disk_bytes'] / GIB:.1f} GiB free",
        ),
        tables=(
            Table(
                title="Execution providers",
                columns=("provider", "usable", "devices, or why not"),
                rows=tuple(
                    (
                        provider["name"],
                        "yes" if provider["usable"] else "no",
                        ", ".join(provider["devices"]) or provider["why_not"] or "-",
                    )
                    for provider in diagnosis["providers"]
                ),
            ),
            Table(
                title="Checks",
                columns=("check", "status", "what, and the cure"),
                rows=tuple(
                    (
                        check["name"],
                        check["status"],
                        " -> ".join(filter(None, (check["message"], check["cure"]))),
                    )
                    for check in diagnosis["checks"]
                ),
            ),
        ),
    )
