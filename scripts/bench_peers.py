#!/usr/bin/env python3
"""Benchmark quantkit's artifact against its peers on the same random GPT-2 weights.

    python scripts/bench_peers.py                        all of it: docs/benchmarks/peers.md and peers.json
    python scripts/bench_peers.py --rounds 9
    python scripts/bench_peers.py --only quantkit-int8_block128,llama.cpp --output /tmp

Each peer gets a virtual environment of its own (pip alone; the first time ten minutes for llama.cpp) under
--cache. Then every system makes its artifact. In each round all of them are opened, each in a fresh process
by a file of scripts/peers, and are then timed in short turns; the machine's read bandwidth takes its turns
with them. A peer that cannot be set up, or fails later, is a row with the reason. This file holds the order
of things and no measurement: those are in scripts/peers, one file a peer.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import statistics
import sys
from pathlib import Path
from typing import Any

from peers import timing
from peers.page import bars, page
from peers.systems import CALM_SHARE, DEFAULT_SCHEME, MODELS, SYSTEMS, System
from peers.worker import Worker
from peers.workplace import PEERS, PeerError, Workplace, run, say

REPOSITORY = Path(__file__).resolve().parent.parent
NUM_MAKES = 2  # of what is compared by time and memory; the faster counts, on both sides
BANDWIDTH = "bandwidth"  # takes its turns like a system
NUM_RETRIES = 2  # of a turn during which other processes took more than CALM_SHARE of the processors


def prepare(place: Workplace, name: str, model: str, made: dict[str, Any]) -> dict[str, Any]:
    """Set a system up for a model; a row with its size and cost, or with the reason why not."""
    system = SYSTEMS[name]
    row: dict[str, Any] = {"label": system.label, "reason": None, "times": {}}
    try:
        place.set_up(system.environment)
        for needed in (system.made_from, name):
            if needed and needed not in made:
                made[needed] = place.make_if_needed(needed, model, NUM_MAKES)
        if system.is_fresh:
            row["make"] = {part: made[name][part] for part in ("seconds", "peak_bytes")}
        row["artifact_bytes"] = place.artifact_bytes(name, model)
    except (PeerError, OSError) as error:
        row["reason"] = str(error)
        say(f"{model}: {name} cannot take part: {error}")
    return row


def command_of(place: Workplace, action: str, name: str, model: str) -> list[str]:
    """What asks one system's file for something about its artifact."""
    system: System = SYSTEMS[name]
    arguments = [str(PEERS / system.script), action, system.variant, str(place.folder(name, model))]
    return [place.python(system.environment), *arguments, MODELS[model]]


def open_worker(place: Workplace, name: str, model: str) -> Worker:
    """A process of its own that has one system open."""
    return Worker(command_of(place, "time", name, model), place.log(f"time-{name}-{model}"))


def read_by_a_token(place: Workplace, name: str, model: str) -> float:
    """Bytes, told by a process of its own: this one stays small, as its children's peaks begin there."""
    told = run(command_of(place, "describe", name, model), place.log(f"describe-{name}-{model}"))
    return float(told.answer["bytes_per_token"])


def calm_turn(worker: Worker) -> tuple[dict[str, list[float]], float]:
    """A turn, again while other processes disturb it; the calmest counts."""
    calmest = worker.turn()
    for _ in range(NUM_RETRIES):
        if calmest[1] > CALM_SHARE:
            calmest = min(calmest, worker.turn(), key=lambda turn: turn[1])
    return calmest


def summary(values: list[float]) -> dict[str, Any]:
    """Median and range over all turns, and the turns themselves."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "turns": [round(value, 4) for value in values],
    }


def open_all(place: Workplace, model: str, rows: dict[str, Any]) -> dict[str, Worker]:
    """What can be opened of the systems and the bandwidth; of the others, the reason."""
    workers: dict[str, Worker] = {}
    with contextlib.suppress(PeerError):  # then there is no floor to compare with
        workers[BANDWIDTH] = Worker([sys.executable, str(PEERS / "read_bandwidth.py")], place.log(BANDWIDTH))
    for name in [name for name, row in rows.items() if not row["reason"]]:
        try:
            workers[name] = open_worker(place, name, model)
        except PeerError as error:
            note_failure(rows, name, model, error)
    return workers


def note_failure(rows: dict[str, Any], name: str, model: str, error: PeerError) -> None:
    """A row takes no further part."""
    if name in rows:
        rows[name]["reason"] = str(error)
    say(f"{model}: {name} failed: {error}")


def measure(place: Workplace, model: str, rows: dict[str, Any], rounds: int, turns: int) -> dict[str, Any]:
    """Rounds of fresh processes, turn by turn; the order moves on by one in each turn."""
    samples: dict[str, dict[str, list[float]]] = {name: {} for name in (*rows, BANDWIDTH)}
    largest_share = 0.0
    for index in range(rounds):
        say(f"{model}: round {index + 1} of {rounds}")
        workers = open_all(place, model, rows)
        for turn in range(turns):
            names = list(workers)
            for name in names[turn % len(names) :] + names[: turn % len(names)] if names else []:
                try:
                    found, other_share = calm_turn(workers[name])
                except PeerError as error:
                    note_failure(rows, name, model, error)
                    workers.pop(name).close()
                    continue
                largest_share = max(largest_share, other_share)
                for key, values in found.items():
                    samples[name].setdefault(key, []).append(statistics.median(values))
        for worker in workers.values():
            worker.close()
    bandwidth = samples[BANDWIDTH].get("gb_per_s", [])
    for name, row in rows.items():
        if not row["reason"]:
            row["times"] = {key: summary(values) for key, values in samples[name].items()}
            if bandwidth and MODELS[model] == "decoder" and not SYSTEMS[name].is_peer:
                with contextlib.suppress(PeerError):  # then there is no floor either
                    row["bytes_per_token"] = read_by_a_token(place, name, model)
                    row["floor_ms"] = row["bytes_per_token"] / statistics.median(bandwidth) / 1e6
    return {"bandwidth": bandwidth, "other_share": largest_share}


def describe_machine() -> dict[str, Any]:
    """What the numbers depend on."""
    processor = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        pairs = [
            line.split(":", 1) for line in cpuinfo.read_text(encoding="utf-8").splitlines() if ":" in line
        ]
        facts = {key.strip(): value.strip() for key, value in pairs}
        wanted = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8")
        flags = [flag for flag in wanted if flag in facts.get("flags", "").split()]
        processor = f"{facts.get('model name', processor)} ({', '.join(flags)})"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    system = f"{platform.system()} {platform.release()}"
    return {"processor": processor, "cores": os.cpu_count(), "memory_gb": memory / 1e9, "system": system}


def bench(place: Workplace, names: list[str], models: list[str], rounds: int, turns: int) -> dict[str, Any]:
    """Prepare everything, then measure: nothing is installed or built while something is timed."""
    parts: dict[str, Any] = {}
    for model in models:
        made: dict[str, Any] = {}
        taking_part = [name for name in names if MODELS[model] in SYSTEMS[name].kinds]
        rows = {name: prepare(place, name, model, made) for name in taking_part}
        source = place.source(model) / "model.safetensors"
        parts[model] = {"source_bytes": source.stat().st_size, "systems": rows}
    default = f"quantkit-{DEFAULT_SCHEME}"
    if "gpt2" in parts and default in names and not parts["gpt2"]["systems"][default]["reason"]:
        with contextlib.suppress(PeerError):
            parts["gpt2"]["bare_peak_bytes"] = place.make(default, "gpt2-tiny")["peak_bytes"]
    disturbances, bandwidth = [], []
    for model, part in parts.items():
        noted = measure(place, model, part["systems"], rounds, turns)
        disturbances.append(noted["other_share"])
        bandwidth += noted["bandwidth"]
    environments = {SYSTEMS[name].environment: None for name in names}
    versions = {}
    for environment in environments:
        try:
            versions[environment] = place.versions(environment)
        except (PeerError, OSError):
            versions[environment] = []
    document = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": describe_machine(),
        "versions": versions,
        "num_rounds": rounds,
        "num_turns": turns,
        "num_threads": timing.NUM_THREADS,
        "num_prompt_tokens": timing.NUM_PROMPT_TOKENS,
        "num_new_tokens": timing.NUM_NEW_TOKENS,
        "bandwidth_gb_per_s": summary(bandwidth) if bandwidth else None,
        "largest_other_share": max(disturbances, default=0.0),
        "models": parts,
    }
    return {**document, "bars": bars(document)}


def chosen(text: str | None, allowed: list[str], what: str) -> list[str]:
    """The named ones, in the table's order."""
    wanted = set(text.split(",")) if text else set(allowed)
    if unknown := sorted(wanted - set(allowed)):
        sys.exit(f"bench_peers: no {what} '{unknown[0]}'; there are: {', '.join(allowed)}")
    return [name for name in allowed if name in wanted]


def main() -> None:
    """Read the command line, measure, write the page."""
    default_cache = Path.home() / ".cache" / "quantkit" / "peers"
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--only", metavar="NAME,...", help=f"of {', '.join(SYSTEMS)}")
    parser.add_argument("--models", metavar="NAME,...", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of fresh processes  [3]")
    parser.add_argument("--turns", type=int, default=8, help="turns of each system in a round  [8]")
    parser.add_argument(
        "--cache", type=Path, default=default_cache, help="environments and models  [%(default)s]"
    )
    parser.add_argument(
        "--output", type=Path, default=REPOSITORY / "docs" / "benchmarks", help="[docs/benchmarks]"
    )
    parser.add_argument("--json", action="store_true", help="print the document instead of the page")
    arguments = parser.parse_args()
    names = chosen(arguments.only, list(SYSTEMS), "system")
    models = chosen(arguments.models, list(MODELS), "model")
    place = Workplace(arguments.cache.expanduser().absolute())
    try:
        document = bench(place, names, models, max(1, arguments.rounds), max(1, arguments.turns))
    except PeerError as error:  # of the random weights, without which there is nothing to measure
        sys.exit(f"bench_peers: {error}")
    text = json.dumps(document, indent=1) + "\n"
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "peers.json").write_text(text, encoding="utf-8")
    (arguments.output / "peers.md").write_text(page(document), encoding="utf-8")
    print(text if arguments.json else page(document), end="")


if __name__ == "__main__":
    main()
