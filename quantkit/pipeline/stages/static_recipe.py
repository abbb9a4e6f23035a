"""The recipe of a target with fixed shapes: lengths and scheme are decided, impossible options refused."""

from __future__ import annotations

from quantkit.errors import InputError, not_one_of
from quantkit.export.static.decoder import why_not_static
from quantkit.export.static.encoder import why_not_static_encoder
from quantkit.export.static.operators import StaticShape
from quantkit.model.model_map import ModelMap
from quantkit.pipeline.stages.export_static import GRAPHS
from quantkit.plan.formats import AUTO, DEFAULT_STATIC_SCHEME, SCHEMES, static_bits
from quantkit.plan.plan import Plan
from quantkit.plan.targets import TARGETS
from quantkit.recipe import Recipe, Static, override

PROMPT, CACHE = 128, 512  # tokens, where the recipe names no lengths and the model allows these
BROKEN_PROMPT = 16  # the one length whose products Qualcomm's compiler gets wrong (docs/log.md)
WEIGHTS_ONLY_SCHEME = "int8_channel"


def settle_static(recipe: Recipe, model_map: ModelMap, kind: str) -> Recipe:
    """Decide lengths and scheme; refuse what the target cannot do. Other targets keep their recipe."""
    if not TARGETS[recipe.target].is_static:
        if recipe.static != Static():
            static_targets = [name for name, row in TARGETS.items() if row.is_static]
            raise InputError(
                f"target '{recipe.target}' takes texts of any length",
                where="static",
                allowed=f"lengths where the target is {', '.join(static_targets)}",
                next_step="leave prompt and cache lengths out, or choose that target",
            )
        return recipe
    where = f"--target {recipe.target}"
    if kind not in GRAPHS:
        raise InputError(
            f"{model_map.architecture} is {kind}, and there are no graphs of fixed shapes for that",
            where=where,
            allowed=f"architectures that are written as a fused {' or '.join(GRAPHS)}",
            next_step="leave --target out",
        )
    names = _static_schemes(recipe.target)
    if recipe.scheme == AUTO:
        recipe = override(recipe, {"scheme": names[0]})
    if recipe.scheme not in names:
        raise not_one_of(recipe.scheme, names, where=where, what=f"scheme '{recipe.scheme}'")
    refused = {
        "--layer": (bool(recipe.layers), "a static graph has one scheme"),
        "--cache": (recipe.cache != "float32", "the target decides the format of keys and values"),
        "a budget": (recipe.searches, "a static graph has one format, so there is nothing to search"),
        "--keep-latent": (recipe.keep_latent, "static graphs give logits, keys and values alone"),
        "--min-dim auto": (recipe.select.min_dim == AUTO, "times of this CPU say nothing about an NPU"),
    }
    for flag, (is_given, reason) in refused.items():
        if is_given:
            raise InputError(f"{flag}: {reason}", where=where, next_step=f"leave {flag} out")
    return override(recipe, _lengths(recipe.static, model_map, kind, where))


def _static_schemes(target: str) -> list[str]:
    """Schemes of a static target, its default first."""
    if not TARGETS[target].rounds_values:
        return [WEIGHTS_ONLY_SCHEME]
    others = [name for name in SCHEMES if static_bits(name) is not None and name != DEFAULT_STATIC_SCHEME]
    return [DEFAULT_STATIC_SCHEME, *others]


def _lengths(static: Static, model_map: ModelMap, kind: str, where: str) -> dict[str, int]:
    """Prompt and cache lengths; given ones are kept or refused, defaults shrink to the model's context."""
    attentions = [attention for block in model_map.blocks for attention in block.attentions]
    windows = [attention.window for attention in attentions if attention.is_causal and attention.window]
    context = model_map.context or CACHE + PROMPT
    longest = min([context, *windows])
    prompt = static.prompt or min(PROMPT, longest - (kind == "decoder"))
    if static.prompt is None and prompt == BROKEN_PROMPT:
        prompt -= 1
    if prompt == BROKEN_PROMPT:
        raise InputError(
            f"{prompt} tokens are the one length that Qualcomm's compiler gets wrong",
            where="static.prompt",
            allowed=f"any other from 2 to {longest}",
        )
    if prompt > longest:
        raise InputError(
            f"{prompt} tokens", where="static.prompt", allowed=f"2 to {longest} for {model_map.architecture}"
        )
    if kind != "decoder":
        if static.cache is not None:
            raise InputError("an encoder keeps no cache", where="static.cache", next_step="leave it out")
        reason = why_not_static_encoder(model_map, prompt)
        if reason:
            raise InputError(f"no static graph for it: {reason}", where=where)
        return {"static.prompt": prompt}
    cache = static.cache or max(prompt, min(CACHE, longest - 1))
    if not prompt <= cache < longest:
        raise InputError(
            f"{cache} tokens",
            where="static.cache",
            allowed=f"{prompt} (the prompt) to {longest - 1}: the token behind it counts too",
        )
    reason = why_not_static(model_map, StaticShape(tokens=1, past=cache))
    if reason:
        raise InputError(f"no static graph for it: {reason}", where=where)
    return {"static.prompt": prompt, "static.cache": cache}


def window_length(recipe: Recipe, kind: str) -> int:
    """Tokens of a calibration window: as many as the graphs see, so that every position has a range."""
    reach = recipe.static.cache + 1 if recipe.static.cache else recipe.static.prompt
    assert reach is not None, "lengths are decided when the recipe is resolved"
    return reach if kind != "decoder" else min(reach, max(recipe.calibration.length, 2))


def static_notes(recipe: Recipe, plan: Plan) -> tuple[str, ...]:
    """Notes of the report on a target with fixed shapes."""
    target = TARGETS[recipe.target]
    if not target.is_static:
        return ()
    notes = []
    kept = plan.projections.total - plan.projections.quantized
    if kept and target.rounds_values:
        notes.append(f"not picked, and with 8-bit weights all the same, since an NPU has no floats: {kept}")
    if recipe.static.cache:
        notes.append(
            f"prompt.onnx reads {recipe.static.prompt} tokens at once, decode.onnx one token behind up to "
            f"{recipe.static.cache} others; longer prompts go on token by token"
        )
    if target.rounds_values and recipe.measure.latency:
        notes.append(
            "times are of the CPU, which computes these graphs in floats; 'bench --provider' times others"
        )
    if static_bits(recipe.scheme) == 8:
        notes.append(
            "8-bit ranges fixed by calibration lose more accuracy than any other scheme: check the accuracy; "
            "int8_static16 keeps more"
        )
    return tuple(notes)
