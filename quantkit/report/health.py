"""The page of `quantkit doctor`: processor, memory, execution providers and checks of this machine."""

from __future__ import annotations

from typing import Any

from quantkit.report.tables import Cells, Page, table_of

GIB = 1 << 30
PROVIDERS: Cells = {
    "provider": lambda provider: str(provider["name"]),
    "usable": lambda provider: "yes" if provider["usable"] else "no",
    "devices or reason": lambda provider: ", ".join(provider["devices"]) or provider["why_not"] or "-",
}
CHECKS: Cells = {
    "check": lambda check: str(check["name"]),
    "status": lambda check: str(check["status"]),
    "result -> remedy": lambda check: " -> ".join(filter(None, (check["message"], check["cure"]))),
}


def health_page(diagnosis: dict[str, Any]) -> Page:
    """The page, from the JSON form of a diagnosis."""
    cpu, memory = diagnosis["cpu"], diagnosis["memory"]
    features = ", ".join(name for name, present in cpu["features"].items() if present)
    packages = ", ".join(
        f"{name} {version}" for name, version in diagnosis["packages"].items() if version is not None
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
            table_of("Execution providers", diagnosis["providers"], PROVIDERS, text=3),
            table_of("Checks", diagnosis["checks"], CHECKS, text=3),
        ),
    )
