"""How fast this machine reads memory, as quantkit measures it: the floor under a token is bytes over this."""

from __future__ import annotations

import dataclasses
import json

import timing

from quantkit.export.probe import build_probe_models
from quantkit.runtime.throughput import measure_throughput

if __name__ == "__main__":
    models = build_probe_models()
    fields = {field.name: getattr(models, field.name) for field in dataclasses.fields(models)}
    throughput = measure_throughput(**fields, num_threads=timing.NUM_THREADS)
    print(json.dumps({"gb_per_s": throughput.bandwidth_gb_per_s}))
