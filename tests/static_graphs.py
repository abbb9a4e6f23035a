"""What tests of static graphs share: a tiny or the bundled decoder, as float and as integer graphs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from exporting import NOTHING, export
from stored import open_checkpoint

from quantkit.export.graph import save
from quantkit.export.static.decoder import emit_static
from quantkit.export.static.operators import StaticShape
from quantkit.export.static.qdq import Bits, quantize_static
from quantkit.export.static.ranges import showing_ranges
from quantkit.model.inspect import inspect
from quantkit.plan.targets import Target
from quantkit.runtime.ranges import observe_ranges

TARGET = Target(opset=21, ir_version=10, domains=(), description="static graphs of standard operators")


@dataclass(frozen=True)
class Graphs:
    """A prompt graph and a decode graph."""

    folder: Path
    models: dict
    whole: onnx.ModelProto  # the prompt graph with the logits of all tokens, for calibration

    def save(self, label: str) -> dict[str, Path]:
        """The files that hold them."""
        paths = {kind: self.folder / f"{kind}_{label}.onnx" for kind in self.models}
        for kind, model in self.models.items():
            save(model, paths[kind])
        return paths


def emit_both(
    source: Path,
    folder: Path,
    *,
    prompt: int,
    past: int,
    min_dim: int = NOTHING,
    gives_all_logits: bool = True,
    **options,
) -> Graphs:
    """Both graphs of a checkpoint folder, before their activations have grids."""
    exported = export(source, folder, min_dim=min_dim, keeps_checkpoint=True, **options)
    model_map, checkpoint = inspect(str(source)), open_checkpoint(folder / "weights.safetensors")
    read = StaticShape(tokens=prompt, gives_all_logits=gives_all_logits)
    shapes = {"prompt": read, "decode": StaticShape(tokens=1, past=past)}
    shapes["whole"] = StaticShape(tokens=prompt)
    models = {
        kind: emit_static(model_map, exported.contents, checkpoint, shape=shape, target=TARGET, metadata={})
        for kind, shape in shapes.items()
    }
    return Graphs(folder, models, models.pop("whole"))


def round_both(graphs: Graphs, windows: np.ndarray, bits: Bits) -> Graphs:
    """The same graphs in integers, calibrated on windows [number, prompt]."""
    opened, names = showing_ranges(graphs.whole)
    save(opened, graphs.folder / "values.onnx")
    shown = np.ones((1, windows.shape[1]), np.int32)
    feeds = [{"input_ids": row[None].astype(np.int32), "attention_mask": shown} for row in windows]
    ranges = observe_ranges(graphs.folder / "values.onnx", names, feeds, threads=1)
    return Graphs(
        graphs.folder,
        {
            kind: quantize_static(model, ranges, bits, kept_in=graphs.folder)
            for kind, model in graphs.models.items()
        },
        graphs.whole,
    )
