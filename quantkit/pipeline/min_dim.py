"""`--min-dim auto` and `--prefer speed`: decisions from the times of this machine's own products.

Shapes of the model are timed once in float and in the formats in question, cached for the machine, and the
smallest size from which integers win becomes the rule that the rest of the pipeline applies.
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
    recipe: Recipe, model_map: ModelMap, progress: Progress, *, packs_attention: bool, generates: bool
) -> tuple[Recipe, tuple[ShapeTime, ...], tuple[str, ...]]:
    """The recipe with a size in place of "auto", the times that it came from, and notes."""
    formats = formats_of(model_map, SCHEMES[recipe.scheme], recipe.layers)
    everything = choose(model_map, min_dim=1, include=recipe.select.include, exclude=recipe.select.exclude)
    contents = contents_of(model_map, everything, formats, packs_attention=packs_attention)
    packs = [pack for pack in contents.packs if pack.grid]
    products = products_of(packs, formats, prompt_rows=recipe.measure.prompt)
    times = _measure(products, recipe, progress)
    found = auto_min_dim(model_map, products, times, decode_weight=64.0 if generates else 0.0)
    exclude = [*recipe.select.exclude, *found.excluded]
    notes = (*found.notes, *(f"'{name}' stays float: {words}" for name, words in found.excluded.items()))
    decided = override(recipe, {"select.min_dim": found.min_dim, "select.exclude": exclude})
    return decided, times, notes


def unit_times(
    recipe: Recipe, units: Sequence[Pack], names: Sequence[str], progress: Progress
) -> Callable[[Pack, str], float]:
    """Microseconds that a decoded token spends in a unit, in one of the formats; "float" is one too."""
    spelled = {
        (unit.name, name): FLOAT_TIME
        if name == FLOAT
        else format_name(format_named(name, unit), unit.layers[0].role)
        for unit in units
        for name in (*names, FLOAT)
    }
    some = {layer.name: format_named(names[0], unit) for unit in units for layer in unit.layers}
    products = products_of(units, some, prompt_rows=recipe.measure.prompt)
    others = tuple(each for each in dict.fromkeys(spelled.values()) if each != FLOAT_TIME)
    times = _measure(products, recipe, progress, formats=others)
    known = {
        (each.in_features, each.out_features, each.format_name): each for each in times if each.rows == 1
    }

    def microseconds(unit: Pack, name: str) -> float:
        found = known.get((unit.in_features, unit.out_features, spelled[unit.name, name]))
        if found is not None:
            return found.median_us
        # Too large to be timed, and so bound by reading: bytes at a usual bandwidth.
        width = 4.0 if name == FLOAT else format_named(name, unit).grid.bits / 8
        return unit.in_features * unit.out_features * width / USUAL_BYTES_PER_US

    return microseconds


def _measure(
    products: Sequence[Product], recipe: Recipe, progress: Progress, formats: Sequence[str] = ()
) -> tuple[ShapeTime, ...]:
    shapes = {(each.in_features, each.out_features) for each in products}
    with progress.stage("times of products", total=len(shapes), unit="shapes") as count:
        return measure_products(
            products,
            build=write_product_probe,
            num_bytes=product_bytes,
            settings=Settings(threads=recipe.measure.threads or read_cpu().num_threads),
            formats=formats,
            progress=count,
        )
