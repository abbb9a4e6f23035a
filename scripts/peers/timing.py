"""How every system is timed, in its own process and environment: the same tokens, the same order.

What: a file beside this one says how its system makes a model and opens one; `main` turns that into the two
commands that `scripts/bench_peers.py` calls. Only the standard library is used, so that it runs everywhere.

    python FILE make VARIANT SOURCE OUTPUT
    python FILE time VARIANT FOLDER decoder|encoder NUM_REPEATS

The answer is the last line of stdout, as JSON. A decoder reads a prompt of 128 tokens into an empty cache
(making or clearing the cache is part of the prompt's time) and is then fed 32 given tokens one by one, as
llama-bench does, so that no system's time holds another way of choosing tokens.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NUM_PROMPT_TOKENS = 128
NUM_NEW_TOKENS = 32
NUM_THREADS = 2
VOCABULARY = 30000  # below every model's own, so that the same tokens suit them all

Feed = Callable[[list[int]], object]
OpenDecoder = Callable[[str, Path], tuple[Callable[[], object], Feed]]
OpenEncoder = Callable[[str, Path], Feed]
Samples = dict[str, list[float]]


def tokens(count: int, *, seed: int = 0) -> list[int]:
    """The same tokens for everybody."""
    generator = random.Random(seed)
    return [generator.randrange(100, VOCABULARY) for _ in range(count)]


def time_decoder(clear: Callable[[], object], feed: Feed, num_repeats: int) -> Samples:
    """One pass to warm up, then passes of a prompt and the tokens after it."""
    prompt, following = tokens(NUM_PROMPT_TOKENS), tokens(NUM_NEW_TOKENS, seed=1)
    prefill_ms, decode_ms = [], []
    for _ in range(num_repeats + 1):
        begin = time.perf_counter()
        clear()
        feed(prompt)
        middle = time.perf_counter()
        for token in following:
            feed([token])
        end = time.perf_counter()
        prefill_ms.append((middle - begin) * 1e3)
        decode_ms.append((end - middle) * 1e3 / NUM_NEW_TOKENS)
    return {"prefill_ms": prefill_ms[1:], "decode_ms": decode_ms[1:]}


def time_encoder(feed: Feed, num_repeats: int) -> Samples:
    """Five runs to warm up, then five for each repeat."""
    sentence = tokens(NUM_PROMPT_TOKENS)
    samples = []
    for _ in range(5 + 5 * num_repeats):
        begin = time.perf_counter()
        feed(sentence)
        samples.append((time.perf_counter() - begin) * 1e3)
    return {"encode_ms": samples[5:]}


def main(
    *,
    make: Callable[[str, Path, Path], None] | None = None,
    open_decoder: OpenDecoder | None = None,
    open_encoder: OpenEncoder | None = None,
    time_itself: Callable[[str, Path, int], Samples] | None = None,
) -> None:
    """Obey one command line; `time_itself` is for a system that has a clock of its own."""
    action, variant, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    answer: dict[str, Any] = {}
    if action == "make" and make:
        make(variant, folder, Path(sys.argv[4]))
    else:
        kind, num_repeats = sys.argv[4], int(sys.argv[5])
        if time_itself:
            answer = dict(time_itself(variant, folder, num_repeats))
        elif kind == "decoder" and open_decoder:
            answer = dict(time_decoder(*open_decoder(variant, folder), num_repeats))
        elif kind == "encoder" and open_encoder:
            answer = dict(time_encoder(open_encoder(variant, folder), num_repeats))
        else:
            sys.exit(f"no {kind} here")
    print(json.dumps(answer))
