"""Logits through the cache, as tests compare them with those of whole texts."""

from __future__ import annotations

import numpy as np

from quantkit.runtime.decoder import start, step


def one_by_one(decoder, ids, mask=None, *, prompt, room=0):
    """Logits of the prompt's last position and of each later token, [batch, tokens, vocabulary]."""
    state = start(decoder, batch=len(ids), capacity=ids.shape[1] + room)
    made = [step(state, ids[:, :prompt], None if mask is None else mask[:, :prompt]).copy()]
    made += [step(state, ids[:, place : place + 1]).copy() for place in range(prompt, ids.shape[1])]
    return np.stack(made, axis=1)
