"""Texts to vectors: how an encoder's texts are cut into tokens, batched by length, and run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from quantkit.errors import InputError, not_one_of
from quantkit.files import expect, read_json
from quantkit.runtime.encoder import Encoder
from quantkit.runtime.graph import Floats
from quantkit.runtime.tokenizer import Text, token_ids

BATCH_TOKENS, BATCH_TEXTS = 4096, 64  # padding included


def token_rows(
    encoder: Encoder, tokenizer: Text, texts: Sequence[str], prompt: str | None = None
) -> list[list[int]]:
    """Token ids of each text behind a prompt of the model, cut where a sentence model cuts.

    A text that is too long for any other encoder is refused.
    """
    if not texts:
        raise InputError("there is no text", where="texts", allowed="one text or more")
    settings = _settings(encoder)
    prefix = _prompt(settings, prompt)
    limits = [limit for limit in (encoder.context, encoder.fixed_length) if limit]
    limits += [settings["max_tokens"]] if settings.get("max_tokens") else []
    most = min(limits, default=None)
    cuts = bool(settings) or encoder.metadata.get("vector") is not None
    rows = []
    for text in texts:
        read = (prefix + text).lower() if settings.get("lowercases") else prefix + text
        ids = tokenizer.encode(read, most=most if cuts else None)
        if most and len(ids) > most:
            raise InputError(
                f"a text of {len(ids)} tokens", where="texts", allowed=f"up to {most}", next_step="shorten it"
            )
        rows.append(ids)
    return rows


def _settings(encoder: Encoder) -> dict[str, Any]:
    """How the texts of a sentence model are read; empty for another encoder."""
    where = "the metadata 'quantkit' of the graph"
    settings: dict[str, Any] = expect(dict(encoder.metadata), "sentence", dict, where=where) or {}
    for key, kind in (("max_tokens", int), ("lowercases", bool), ("prompts", dict), ("default_prompt", str)):
        expect(settings, key, kind, where=where)
    return settings


def prompt_of(encoder: Encoder, names: Sequence[str]) -> str | None:
    """The first of some names that is a prompt of the model."""
    prompts = _settings(encoder).get("prompts") or {}
    return next((name for name in names if name in prompts), None)


def _prompt(settings: Mapping[str, Any], name: str | None) -> str:
    prompts = settings.get("prompts") or {}
    name = settings.get("default_prompt") if name is None else name
    if name is None:
        return ""
    if name not in prompts:
        raise not_one_of(name, prompts, where="prompt")
    return str(prompts[name])


def vectors(
    encoder: Encoder, rows: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None = None
) -> Floats:
    """One vector a text, [N, D], run in batches of similar lengths; token types are zeros by default."""
    config = encoder.folder / "config.json"
    ids = token_ids(read_json(config), "pad_token_id", where=config) if config.exists() else ()
    padding = next(iter(ids), 0)
    found: dict[int, Floats] = {}
    for batch in batches([len(row) for row in rows]):
        longest = max(1, *(len(rows[index]) for index in batch))
        if encoder.metadata.get("fills"):  # the model reads padding as it reads tokens
            longest = encoder.context or longest
        ids_BT = np.full((len(batch), longest), padding, np.int64)
        mask_BT, types_BT = np.zeros_like(ids_BT), np.zeros_like(ids_BT)
        for place, index in enumerate(batch):
            ids_BT[place, : len(rows[index])] = rows[index]
            mask_BT[place, : None if encoder.metadata.get("fills") else len(rows[index])] = 1
            types_BT[place, : len(rows[index])] = types[index] if types else 0
        found |= dict(zip(batch, encoder.vectors(ids_BT, mask_BT, types_BT), strict=True))
    return np.stack([found[index] for index in range(len(rows))])


def batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Indices of texts of similar lengths, the longest first, so that little is padded."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        longest = lengths[batch[0]] if batch else 0
        if batch and (len(batch) == BATCH_TEXTS or longest * (len(batch) + 1) > BATCH_TOKENS):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
