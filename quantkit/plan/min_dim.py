"""`--min-dim auto`: the smallest size from which integer products are faster on this machine.

An integer product reads a quarter of the bytes and must first round what it multiplies. Below some size,
which depends on the machine and on the format, the rounding costs more than the reading saves. Times come
from measurements; here they are only compared. A user sees the result as the rule that he knows: a size,
and the projections from that size on that stay float because they were slower.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from quantkit.model.model_map import Layer, ModelMap


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapeTime:
    """The time of one matrix product on this machine, in one format, for a number of rows."""

    in_features: int
    out_features: int
    format_name: str  # "float32", or integers: "int8_block128", "int8_tensor"
    rows: int  # 1: a decoded token; more: a prompt
    median_us: float
    spread_us: float  # between the quartiles
    runs: int  # timed products


FLOAT = "float32"
TOKENS_PER_PROMPT = 64.0  # generated for each prompt, where nothing else is said
Key = tuple[int, int, str]  # in_features, out_features, format


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """One matrix product as the exported model runs it: a projection, or several that are packed."""

    layers: tuple[str, ...]  # the projections that it computes
    in_features: int
    out_features: int
    format_name: str  # what it would be quantized to
    has_bias: bool = False
    reads_table: bool = False  # left in float, it reads the embedding's table as it lies there
    prompt_rows: int = 1  # rows that a prompt gives it: all of them, or one where only the last is wanted

    @property
    def key(self) -> Key:
        """What its times are found by."""
        return self.in_features, self.out_features, self.format_name


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Integer beside float for one shape and format."""

    in_features: int
    out_features: int
    format_name: str
    prompt_rows: int
    decode: tuple[ShapeTime, ShapeTime]  # (integer, float), one row
    prompt: tuple[ShapeTime, ShapeTime]
    wins: bool  # both together, a prompt and the tokens after it
    wins_decode: bool
    wins_prompt: bool

    @property
    def words(self) -> str:
        """The two times that decide, or those of the prompt where they disagree with the token's."""
        parts = [f"INT{_bits(self.format_name)} {_us(self.decode[0])}, float {_us(self.decode[1])} a token"]
        if self.prompt_rows > 1:
            parts.append(f"{_us(self.prompt[0])}, {_us(self.prompt[1])} for {self.prompt_rows}")
        return f"measured: {'; '.join(parts)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoSize:
    """The rule that the measurements lead to."""

    min_dim: int
    excluded: Mapping[str, str]  # projections from that size on that stay float, and why
    verdicts: tuple[Verdict, ...]  # one for each shape that was measured
    notes: tuple[str, ...] = ()


def faster_than_float(
    products: Iterable[Product], times: Iterable[ShapeTime], *, decode_weight: float = TOKENS_PER_PROMPT
) -> dict[Key, Verdict]:
    """A verdict for each shape and format whose times are all there.

    What counts is a prompt and `decode_weight` tokens after it; 0 for a model that generates nothing. A
    difference within half the distance of the quartiles is none, and then integers win: they are smaller.
    """
    found = {(each.in_features, each.out_features, each.format_name, each.rows): each for each in times}
    verdicts: dict[Key, Verdict] = {}
    for product in products:
        shape, rows = (product.in_features, product.out_features), product.prompt_rows
        wanted = [(*shape, name, count) for count in (1, rows) for name in (product.format_name, FLOAT)]
        if product.key in verdicts or not all(each in found for each in wanted):
            continue
        decode, prompt = (found[wanted[0]], found[wanted[1]]), (found[wanted[2]], found[wanted[3]])
        verdicts[product.key] = Verdict(
            in_features=product.in_features,
            out_features=product.out_features,
            format_name=product.format_name,
            prompt_rows=rows,
            decode=decode,
            prompt=prompt,
            wins=_is_faster([(1.0, prompt), (decode_weight, decode)]),
            wins_decode=_is_faster([(1.0, decode)]),
            wins_prompt=_is_faster([(1.0, prompt)]),
        )
    return verdicts


def _is_faster(weighted: Sequence[tuple[float, tuple[ShapeTime, ShapeTime]]]) -> bool:
    gain = sum(weight * (floats.median_us - integers.median_us) for weight, (integers, floats) in weighted)
    spread = sum(weight * max(each.spread_us for each in pair) for weight, pair in weighted)
    return gain >= -spread / 2


def auto_min_dim(
    model_map: ModelMap,
    products: Sequence[Product],
    times: Iterable[ShapeTime],
    *,
    decode_weight: float = TOKENS_PER_PROMPT,
) -> AutoSize:
    """The smallest size of which some projection wins, and every projection from there on that loses.

    A product that was not measured is quantized: what is too large to be timed is bound by reading it. A
    projection of no product, because the user left it out, has no say.
    """
    verdicts = faster_than_float(products, times, decode_weight=decode_weight)
    product_of = {name: product for product in products for name in product.layers}
    lost: dict[str, str] = {}
    winners: list[Layer] = []
    for layer in model_map.layers:
        if layer.name not in product_of:
            continue
        verdict = verdicts.get(product_of[layer.name].key)
        if verdict is None or verdict.wins:
            winners.append(layer)
        else:
            lost[layer.name] = verdict.words
    notes = []
    unmeasured = {product.key[:2] for product in products if product.key not in verdicts}
    if unmeasured:
        shapes = ", ".join(f"{rows} x {columns}" for rows, columns in sorted(unmeasured)[:4])
        notes.append(f"{len(unmeasured)} shapes were not measured and count as faster in integers: {shapes}")
    sizes = [max(layer.in_features, layer.out_features) for layer in winners]
    every = [max(layer.in_features, layer.out_features) for layer in model_map.layers]
    min_dim = min(sizes) if sizes else max(every, default=0) + 1
    if not sizes and every:
        notes.append("float is faster for every shape of this model here, so nothing is quantized")
    large = {
        layer.name for layer in model_map.layers if max(layer.in_features, layer.out_features) >= min_dim
    }
    return AutoSize(
        min_dim=min_dim,
        excluded={name: reason for name, reason in lost.items() if name in large},
        verdicts=tuple(verdicts.values()),
        notes=tuple(notes),
    )


def _bits(format_name: str) -> str:
    return "4" if format_name.startswith("int4") else "8"


def _us(time: ShapeTime) -> str:
    return f"{time.median_us:.0f} us" if time.median_us >= 10 else f"{time.median_us:.1f} us"
