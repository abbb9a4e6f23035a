"""`quantkit doctor`: the machine and what is installed on it."""

from __future__ import annotations

from quantkit.cli.app import AsJson, app, finish, show


@app.command(short_help="List runtimes, providers and devices of this machine.")
def doctor(as_json: AsJson = False) -> None:
    """List runtimes, providers and devices of this machine; name clashes with their cure."""
    from quantkit.model.model_map import to_json
    from quantkit.report.health import health_page
    from quantkit.runtime.machine.facts import diagnose

    diagnosis = diagnose()
    document = to_json(diagnosis)
    show(document, health_page(document), "json" if as_json else "table")
    finish(not diagnosis.has_problem)
