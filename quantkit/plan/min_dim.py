"""`--min-dim auto`: the smallest size from which integer MatMuls are faster than float on this machine.

An integer MatMul reads a quarter of the bytes but quantizes its input first. Below some size, which depends
on the machine and on the format, quantizing costs more time than reading saves. The result is an ordinary
size rule, with exclusions for larger projections that are slower as integers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from quantkit.model.model_map import ModelMap


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapeTime:
    """Time of one MatMul on this machine, in one format, for a number of rows."""

    in_features: int
    out_features: int
    format_name: str  # "float32", "int8_block128", "int8_tensor", ...
    rows: int  # 1: a decoded token; more: a prompt
    median_us: float
    spread_us: float  # between the quartiles
    runs: int


FLOAT = "float32"
TOKENS_PER_PROMPT = 64.0  # decoded tokens per prompt
Key = tuple[int, int, str]  # in_features, out_features, format


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """One MatMul of the exported model: a projection or a pack of projections."""

    layers: tuple[str, ...]  # names of its projections
    in_features: int
    out_features: int
    format_name: str  # of the quantized MatMul
    has_bias: bool = False
    reads_table: bool = False  # tied: the float MatMul reads the embedding table in its own layout
    prompt_rows: int = 1  # rows of a prompt: all, or only the last

    @property
    def key(self) -> Key:
        return self.in_features, self.out_features, self.format_name


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Integer beside float for one shape and format."""

    product: Product
    decode: tuple[ShapeTime, ShapeTime]  # (integer, float), one row
    prompt: tuple[ShapeTime, ShapeTime]
    wins: bool  # integers, over a prompt and its decoded tokens

    @property
    def words(self) -> str:
        """The measured times, as the reason of a plan."""
        bits, rows = 4 if self.product.format_name.startswith("int4") else 8, self.product.prompt_rows
        parts = [f"INT{bits} {_us(self.decode[0])}, float {_us(self.decode[1])} a token"]
        if rows > 1:
            parts.append(f"{_us(self.prompt[0])}, {_us(self.prompt[1])} for {rows}")
        return f"measured: {'; '.join(parts)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoSize:
    """The size rule from measurements."""

    min_dim: int
    excluded: Mapping[str, str]  # larger projections that stay float -> reason
    notes: tuple[str, ...] = ()


def faster_than_float(
    products: Iterable[Product], times: Iterable[ShapeTime], *, decode_weight: float = TOKENS_PER_PROMPT
) -> dict[Key, Verdict]:
    """A verdict for each shape and format that is completely measured.

    The time of a prompt and of `decode_weight` tokens is compared: 0 tokens for an encoder.
    A difference below half the interquartile distance counts as a win of the integers, which are smaller.
    """
    time_of = {(time.in_features, time.out_features, time.format_name, time.rows): time for time in times}
    verdicts: dict[Key, Verdict] = {}
    for product in products:
        shape, rows = (product.in_features, product.out_features), product.prompt_rows
        keys = [(*shape, name, count) for count in (1, rows) for name in (product.format_name, FLOAT)]
        if product.key in verdicts or not all(key in time_of for key in keys):
            continue
        pairs = [time_of[key] for key in keys]
        decode, prompt = (pairs[0], pairs[1]), (pairs[2], pairs[3])
        verdicts[product.key] = Verdict(
            product=product,
            decode=decode,
            prompt=prompt,
            wins=_is_faster([(1.0, prompt), (decode_weight, decode)]),
        )
    return verdicts


def _is_faster(weighted: Sequence[tuple[float, tuple[ShapeTime, ShapeTime]]]) -> bool:
    gain = sum(weight * (floats.median_us - integers.median_us) for weight, (integers, floats) in weighted)
    spread = sum(weight * max(time.spread_us for time in pair) for weight, pair in weighted)
    return gain >= -spread / 2


def auto_min_dim(
    model_map: ModelMap,
    products: Sequence[Product],
    times: Iterable[ShapeTime],
    *,
    decode_weight: float = TOKENS_PER_PROMPT,
) -> AutoSize:
    """The size of the smallest projection that wins, and the larger projections that lose.

    A product without times is quantized: a MatMul that is too large to time is bound by reading its weights.
    Projections in no product are ignored, because the user excluded them.
    """
    verdicts = faster_than_float(products, times, decode_weight=decode_weight)
    sizes = {layer.name: max(layer.in_features, layer.out_features) for layer in model_map.layers}
    winners: list[str] = []
    losers: dict[str, str] = {}
    for product in products:
        verdict = verdicts.get(product.key)
        if verdict is None or verdict.wins:
            winners += product.layers
        else:
            losers |= dict.fromkeys(product.layers, verdict.words)
    min_dim = min((sizes[name] for name in winners), default=max(sizes.values(), default=0) + 1)
    notes = []
    unmeasured = sorted({product.key[:2] for product in products if product.key not in verdicts})
    if unmeasured:
        shapes = ", ".join(f"{rows} x {columns}" for rows, columns in unmeasured[:4])
        notes.append(f"{len(unmeasured)} shapes were not measured and count as faster in integers: {shapes}")
    if sizes and not winners:
        notes.append("float is faster for every shape of this model here, so nothing is quantized")
    return AutoSize(
        min_dim=min_dim,
        excluded={name: losers[name] for name in sizes if name in losers and sizes[name] >= min_dim},
        notes=tuple(notes),
    )


def _us(time: ShapeTime) -> str:
    return f"{time.median_us:.0f} us" if time.median_us >= 10 else f"{time.median_us:.1f} us"
