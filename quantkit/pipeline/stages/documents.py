"""The documents of an artifact: report.json, report.md, report.html, its model card and manifest.json."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

import psutil

import quantkit
from quantkit.evaluation.measure import Measured, attempt, environment
from quantkit.evaluation.measurements import Latency
from quantkit.evaluation.verdict import judge
from quantkit.model.model_map import to_json
from quantkit.pipeline.inspect import measure_this_machine
from quantkit.pipeline.stages.float_reference import Twin, measures_anything
from quantkit.pipeline.stages.inputs import with_inputs
from quantkit.pipeline.stages.write import Written, layer_losses
from quantkit.plan.cost.phases import MachineRoofline, phase_cost
from quantkit.plan.select import ROLE_GROUPS
from quantkit.plan.targets import TARGETS, may_saturate
from quantkit.quantization.layout import planned_bytes
from quantkit.recipe import dump_recipe
from quantkit.report.card import CARD_FILE, model_card
from quantkit.report.document import Part, PlannedLayer, Report, Size, kept_projections, report_json
from quantkit.report.quantization import quantization_page
from quantkit.report.tables import to_markdown
from quantkit.report.web_page import PAGE_FILE, report_html
from quantkit.runtime.machine.facts import read_cpu
from quantkit.runtime.manifest import HASHED_PACKAGES, MANIFEST, hash_files, sum_files
from quantkit.runtime.providers.placement import Placement, place
from quantkit.runtime.providers.table import PROVIDERS

COPIES_TO_PLACE = 3  # of the weights in memory, while nodes are placed


def cpu_placement(written: Written) -> Placement | None:
    """The share of the graph that the CPU provider runs; None where memory is short."""
    exported = written.exported
    if not measures_anything(written.recipe.measure):
        return None
    if exported.num_bytes * COPIES_TO_PLACE > psutil.virtual_memory().available:
        return None
    return replace(place(PROVIDERS["cpu"], exported.paths), num_nodes=None, operators=None, unplaced=None)


def planned_layers(written: Written) -> tuple[PlannedLayer, ...]:
    formats = {layer.name: pack.format for pack in written.exported.contents.packs for layer in pack.layers}
    layers = []
    for layer, planned in zip(written.prepared.model_map.layers, written.plan.layers, strict=True):
        chosen = formats.get(layer.name)
        layers.append(
            PlannedLayer(
                name=layer.name,
                block=layer.block,
                role=f"cross {layer.role}" if layer.is_cross_attention else str(layer.role),
                in_features=layer.in_features,
                out_features=layer.out_features,
                format=chosen.described if chosen else None,
                reason=planned.reason,
            )
        )
    return tuple(layers)


def machine_roofline(written: Written, latency: Latency | None) -> MachineRoofline | None:
    """Costs of the timed prompt and token on this machine; None where other threads were timed."""
    if latency is None or latency.threads != read_cpu().num_threads:
        return None
    resolved = written.prepared.resolved
    with resolved.progress.stage("roofline"):
        machine = measure_this_machine()
    contents = written.exported.contents
    grids = {layer.name: pack.grid for pack in contents.packs for layer in pack.layers}
    grids |= {entry.table.name: entry.grid for entry in contents.tables}
    bits = {name: grid.stored_bits for name, grid in grids.items() if grid}
    cost = partial(phase_cost, model_map=written.prepared.model_map, bits=bits, machine=machine)
    prompt = latency.prompt_length
    phases = [cost("prompt", num_tokens=prompt, past=0, measured_ms=latency.prefill.median_ms)]
    if latency.decode:
        past = prompt + (latency.num_decoded or 0) // 2
        phases.append(cost("token", num_tokens=1, past=past, measured_ms=latency.decode.median_ms))
    return MachineRoofline(
        machine=machine.description,
        bandwidth_gb_per_s=machine.bandwidth_gb_per_s,
        peak_tera_ops=dict(machine.peak_tera_ops),
        phases=tuple(phases),
    )


def size_parts(written: Written) -> tuple[Part, ...]:
    """Bytes of attention, FFN, head and the rest; none where the file stores floats in half of the plan."""
    contents, num_bytes = written.exported.contents, written.exported.num_bytes
    groups = {role: group for group, roles in ROLE_GROUPS.items() for role in roles}
    parts: dict[str, int] = {}
    for pack in contents.packs:
        role = pack.layers[0].role
        name = f"{groups.get(role, role)}, {f'INT{pack.grid.bits}' if pack.grid else 'float'}"
        parts[name] = parts.get(name, 0) + planned_bytes(pack.tensors())
    for entry in contents.tables:
        name = f"embeddings, {f'INT{entry.grid.bits}' if entry.grid else 'float'}"
        parts[name] = parts.get(name, 0) + planned_bytes(entry.tensors())
    planned = planned_bytes(contents.tensors())
    parts["norms and other parameters"] = planned - sum(parts.values())
    parts["graph"] = num_bytes - planned
    if planned > num_bytes:
        return ()
    return tuple(Part(name=name, num_bytes=count) for name, count in parts.items() if count)


def report_of(written: Written, measured: Measured, twin: Twin) -> Report:
    prepared, resolved = written.prepared, written.prepared.resolved
    recipe, plan, exported = written.recipe, written.plan, written.exported
    failures = [*twin.failures, *measured.failures]
    placement = attempt("placement", partial(cpu_placement, written), failures)
    histograms, reason = written.exported.histograms, ""
    if measured.accuracy or measured.similarity:
        histograms, reason = with_inputs(written)
    roofline = attempt("the roofline", partial(machine_roofline, written, measured.latency), failures)
    return Report(
        model=resolved.model_map.name,
        scheme=recipe.scheme,
        target=recipe.target,
        min_dim=plan.min_dim,
        projections=plan.projections,
        matrices=plan.matrices,
        parameters=plan.parameters,
        formula=plan.formula,
        kept=kept_projections(plan),
        size=Size(
            source_bytes=resolved.weights.source_bytes(),
            planned_bytes=exported.planned_bytes,
            artifact_bytes=exported.num_bytes,
            reference_bytes=twin.num_bytes,
            parts=size_parts(written),
        ),
        environment=environment(),
        accuracy=measured.accuracy,
        similarity=measured.similarity,
        float_error=measured.float_error,
        judgement=judge(measured.float_error, measured.accuracy, measured.similarity),
        latency=(measured.latency,) if measured.latency else (),
        memory=measured.memory,
        placement=(placement,) if placement else (),
        has_random_weights=recipe.random_weights,
        notes=(
            *resolved.model_map.notes,
            *resolved.notes,
            *prepared.notes,
            *measured.notes,
            *_kept_note(written),
            *_saturation_note(written),
            *([reason] if reason else []),
        ),
        failures=tuple(failures),
        recipe=dump_recipe(recipe),
        recipe_sha256=hashlib.sha256(dump_recipe(recipe).encode()).hexdigest(),
        files=hash_files(exported.folder),
        seconds={name: round(seconds, 3) for name, seconds in resolved.progress.seconds.items()},
        fit=recipe.fit,
        transforms=tuple(recipe.transforms),
        layer_losses=layer_losses(exported.contents, exported.losses, written.search),
        histograms=histograms,
        roofline=roofline,
        smoothing=prepared.smoothing,
        search=written.search,
        shape_times=resolved.shape_times,
        samples=measured.samples,
        layers=planned_layers(written),
        kind=exported.kind,
    )


def _kept_note(written: Written) -> Iterator[str]:
    losses = written.exported.losses.values()
    num_kept = sum(sums.num_kept == sums.num_rows for sums in losses)
    if num_kept:
        yield (
            f"{num_kept} of {len(losses)} quantized products keep the codes of the original: their weights "
            "lose nothing more"
        )


def _saturation_note(written: Written) -> Iterator[str]:
    prepared = written.prepared
    target = TARGETS[prepared.resolved.recipe.target]
    if any(may_saturate(target, prepared.formats[name]) for name in prepared.planned):
        yield (
            "on x86 processors without VNNI, programs other than quantkit must set session.x64quantprecision "
            "to 1, or outputs are wrong; files of --target cpu-avx2 need no setting"
        )


def write_reports(folder: Path, report: Report) -> None:
    document = report_json(report)
    (folder / "report.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    (folder / "report.md").write_text(to_markdown(quantization_page(document)), encoding="utf-8")
    (folder / PAGE_FILE).write_text(report_html(document), encoding="utf-8")


def write_card(folder: Path, report: Report, written: Written) -> None:
    """The model card."""
    (folder / CARD_FILE).write_text(model_card(report_json(report), written.recipe), encoding="utf-8")


def write_manifest(folder: Path, written: Written, hashes: Mapping[str, str]) -> None:
    """Versions, plan, and a hash of every file; written after them, as the sign of a whole folder."""
    recipe, placement = written.recipe, written.exported.placement
    files = hash_files(folder, hashes)
    manifest = {
        "quantkit": quantkit.__version__,
        "versions": {name: version(name) for name in HASHED_PACKAGES},
        "target": recipe.target,
        "scheme": recipe.scheme,
        **({"static": recipe.static.model_dump()} if TARGETS[recipe.target].is_static else {}),
        "opset": placement.opset,
        "ir_version": placement.ir_version,
        "integer_operators": placement.integer_operators,
        "plan": to_json(written.plan),
        "card": files.pop(CARD_FILE),  # not with the files, since people may write in it
        "files": files,
        "sums": sum_files(folder),
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n", encoding="utf-8")
