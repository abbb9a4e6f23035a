"""An exported decoder's key-value cache turned into integers, with scales from its own keys and values.

The graph that is about to be changed reads the calibration windows itself, so the ranges are those of what
the runtime will store, rounding of weights and inputs included.
"""

from __future__ import annotations

from quantkit.errors import InputError
from quantkit.export.fused.int8_cache import CACHE_FORMATS, CachePeaks, rewrite, widen
from quantkit.model.model_map import ModelMap
from quantkit.pipeline.export import Exported
from quantkit.pipeline.prepare import Job, tokens_for
from quantkit.runtime.decoder import cached_values, open_decoder

MOST_WINDOWS = 8  # ranges settle soon: every position of every window counts


def quantize_cache(job: Job, model_map: ModelMap, exported: Exported) -> None:
    """Change the graph in its folder, as the recipe says."""
    name = job.recipe.cache
    if CACHE_FORMATS[name].bits is None:
        return
    if exported.kind != "decoder":
        raise InputError(
            f"its cache is not one that can be {name}",
            where=model_map.name,
            allowed="a decoder that is written as a fused graph",
            next_step="leave --cache out",
        )
    windows = tokens_for(job, model_map)[:MOST_WINDOWS]
    peaks: dict[str, CachePeaks] = {}
    decoder = open_decoder(exported.folder)
    with job.progress.stage("ranges of the cache", total=int(windows.size), unit="tokens") as count:
        for window in windows:
            values = cached_values(decoder, window[None])
            for number, block in enumerate(model_map.blocks):
                key, value = values[2 * number], values[2 * number + 1]
                turned = block.attentions[0].rotary_dim
                peaks[block.name] = widen(
                    peaks.get(block.name), key, value, where=block.name, rotary_dim=turned
                )
            count(window.size)
    del decoder
    rewrite(exported.paths[0], [peaks[block.name] for block in model_map.blocks], cache_format=name)
