"""`--min-dim auto` and `--prefer speed`: decisions from matmul times measured on this machine.

The matmul shapes of the model are timed in float and in the candidate formats, and cached for the machine.
The smallest size from which integers are faster becomes `min_dim`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quantkit.export.probes import format_name, product_bytes, products_of, write_product_probe
from quantkit.model.model_map import ModelMap
from quantkit.plan.formats import FLOAT, SCHEMES
from quantkit.plan.min_dim import FLOAT as FLOAT_TIME
from quantkit.plan.min_dim import Product, ShapeTime, auto_min_dim
from quantkit.plan.select import choose
from quantkit.progress import Progress
from quantkit.quantization.layout import Pack, contents_of, formats_of
from quantkit.quantization.sensitivity import format_named
from quantkit.recipe import Recipe, override
from quantkit.runtime.machine.facts import read_cpu
from quantkit.runtime.machine.matmul_times import Settings, measure_products

USUAL_BYTES_PER_US = 20_000  # 20 GB/s


def with_measured_sizes(
    recipe: Recipe, model_map: ModelMap, kind: str, progress: Progress
) -> tuple[Recipe, tuple[ShapeTime, ...], tuple[str, ...]]:
    """(the recipe with a size in place of "auto", the times behind it, notes)."""
    formats = formats_of(model_map, SCHEMES[recipe.scheme], recipe.layers)
    everything = choose(model_map, min_dim=1, include=recipe.select.include, exclude=recipe.select.exclude)
    contents = contents_of(model_map, everything, formats, packs_attention=kind != "traced")
    packs = [pack for pack in contents.packs if pack.grid]
    products = products_of(packs, formats, prompt_rows=recipe.measure.prompt)
    times = _measure(products, recipe, progress)
    choice = auto_min_dim(model_map, products, times, decode_weight=64.0 if kind == "decoder" else 0.0)
    exclude = [*recipe.select.exclude, *choice.excluded]
    notes = (*choice.notes, *(f"'{name}' stays float: {reason}" for name, reason in choice.excluded.items()))
    decided = override(recipe, {"select.min_dim": choice.min_dim, "select.exclude": exclude})
    return decided, times, notes


def pack_times(
    recipe: Recipe, packs: Sequence[Pack], names: Sequence[str], progress: Progress
) -> Callable[[Pack, str], float]:
    """Microseconds that a decoded token spends in a pack, by pack and format name ("float" included)."""
    timed_as = {
        (pack.name, name): FLOAT_TIME
        if name == FLOAT
        else format_name(format_named(name, pack), pack.layers[0].role)
        for pack in packs
        for name in (*names, FLOAT)
    }
    first_format = {layer.name: format_named(names[0], pack) for pack in packs for layer in pack.layers}
    products = products_of(packs, first_format, prompt_rows=recipe.measure.prompt)
    formats = tuple(name for name in dict.fromkeys(timed_as.values()) if name != FLOAT_TIME)
    times = _measure(products, recipe, progress, formats=formats)
    of_a_token = {
        (time.in_features, time.out_features, time.format_name): time for time in times if time.rows == 1
    }

    def microseconds(pack: Pack, name: str) -> float:
        time = of_a_token.get((pack.in_features, pack.out_features, timed_as[pack.name, name]))
        if time is not None:
            return time.median_us
        # Too large to be timed, and so bound by memory: bytes at a usual bandwidth.
        width = 4.0 if name == FLOAT else format_named(name, pack).grid.bits / 8
        return pack.in_features * pack.out_features * width / USUAL_BYTES_PER_US

    return microseconds


def _measure(
    products: Sequence[Product], recipe: Recipe, progress: Progress, formats: Sequence[str] = ()
) -> tuple[ShapeTime, ...]:
    shapes = {(product.in_features, product.out_features) for product in products}
    with progress.stage("times of products", total=len(shapes), unit="shapes") as count:
        return measure_products(
            products,
            build=write_product_probe,
            num_bytes=product_bytes,
            settings=Settings(threads=read_cpu().threads_for(recipe.measure.threads)),
            formats=formats,
            progress=count,
        )
