"""Advice for the rows of a specification: quantize, fuse, tie, cache, or compute fewer logits."""

from __future__ import annotations

from quantkit.model.model_map import ModelMap, Role
from quantkit.plan.cost.roofline import short
from quantkit.plan.cost.rows import Pass, Row

INT8_BITS = 8
LARGE_TABLE_BYTES = 1_000_000
LEAST_GAIN = 1.2  # reduction of bytes below which advice names the arithmetic instead

# Advice for steps without a matrix, by name or else by processing.
FUSE_ATTENTION = "fuse attention: no L x T matrix in memory"
ADVICE = {
    "query norm": "fuse with attention",
    "key norm": "fuse with attention",
    "head scale": "fold into the norm before it",
    "position bias": FUSE_ATTENTION,
    "attention softcap": FUSE_ATTENTION,
    "add": "fuse with the norm",
    "norm": "fuse with the residual add",
    "activation": "fuse into the projection before it",
    "multiply": "fuse with the activation",
    "rotate": "fuse with attention",
    "scale": "fold into the table",
    "softcap": "fuse into the projection before it",
    "scores": FUSE_ATTENTION,
    "softmax": FUSE_ATTENTION,
    "attention x V": FUSE_ATTENTION,
}


def advise(row: Row, run: Pass) -> str:
    """Advice for a row, separated by semicolons; empty where there is none."""
    if not row.calls:
        return ""
    if row.processing == "gather":
        return _table_advice(row, run.model)
    if row.processing != "matmul":
        return ADVICE.get(row.name, ADVICE.get(row.processing, ""))
    advice = []
    tokens = row.output_shape[1]
    if row.group == "head" and tokens > 1 and run.is_causal:
        advice.append(f"compute only the last logits: {short(row.macs - row.macs // tokens, 'MACs')} fewer")
    bits = row.weight_bits or 0
    if bits > INT8_BITS:
        left = row.moved_bytes - row.weight_traffic_bytes * (bits - INT8_BITS) / bits
        factor = row.moved_bytes / left
        gain = f"{factor:.1f}x fewer bytes" if factor > LEAST_GAIN else "INT8 arithmetic"
        advice.append(f"quantize: {gain}")
    if row.name == "QKV projection" and row.stack == "decoder" and not run.past:
        advice.append("cache keys and values for later tokens")
    if "key/value" in row.name:
        advice.append("cache: equal for every decoded token")
    return "; ".join(advice)


def _table_advice(row: Row, model: ModelMap) -> str:
    heads = [layer for layer in model.layers if layer.role is Role.LM_HEAD]
    sharers = [layer.name for layer in heads if layer.tied_to in row.modules]
    if sharers:
        return f"tie: store one table for it and {', '.join(sharers)}, quantized or not"
    if row.name.startswith("token embedding") and any(head.num_weights == row.parameters for head in heads):
        return f"tie with the lm_head if trained so: {short(row.parameters, 'parameters')} fewer"
    is_large = row.weight_bytes > LARGE_TABLE_BYTES and (row.weight_bits or 0) > INT8_BITS
    return "quantize: the table is stored whole, read row by row" if is_large else ""
