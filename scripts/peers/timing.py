"""How every system is timed, in its own process and environment: the same tokens, the same order.

What: a file beside this one says how its system makes a model and opens one; `main` turns that into the
commands that `scripts/bench_peers.py` calls. Only the standard library is used, so that it runs everywhere.

    python FILE make VARIANT SOURCE OUTPUT
    python FILE time VARIANT FOLDER decoder|encoder
    python FILE describe VARIANT FOLDER decoder|encoder

The second one opens the model, says so, and then measures one turn for each line that it reads, until its
input ends; the third tells what else is known of the artifact. Answers are lines of JSON on stdout. A decoder
reads a prompt of 128 tokens into an empty cache (making or clearing the cache is part of the prompt's time)
and is then fed 32 given tokens one by one, as llama-bench does, so that no system's time holds another way of
choosing tokens.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

NUM_PROMPT_TOKENS = 128
NUM_NEW_TOKENS = 32
NUM_THREADS = 2
NUM_SAMPLES = 3  # of a decoder in one turn; their median is the turn's
VOCABULARY = 30000  # below every model's own, so that the same tokens suit them all

Feed = Callable[[list[int]], object]
OpenDecoder = Callable[[str, Path], tuple[Callable[[], object], Feed]]
OpenEncoder = Callable[[str, Path], Feed]
Samples = dict[str, list[float]]


def tokens(count: int, *, seed: int = 0) -> list[int]:
    """The same tokens for everybody."""
    generator = random.Random(seed)
    return [generator.randrange(100, VOCABULARY) for _ in range(count)]


def sampled(
    measure: Callable[[], dict[str, float]], *, warm_ups: int = 1, count: int = NUM_SAMPLES
) -> Samples:
    """What is measured once, some times over, without the first."""
    taken = [measure() for _ in range(warm_ups + count)][warm_ups:]
    return {key: [each[key] for each in taken] for key in taken[0]}


def time_decoder(clear: Callable[[], object], feed: Feed) -> Samples:
    """A prompt and the tokens after it."""
    prompt, following = tokens(NUM_PROMPT_TOKENS), tokens(NUM_NEW_TOKENS, seed=1)

    def measure() -> dict[str, float]:
        begin = time.perf_counter()
        clear()
        feed(prompt)
        middle = time.perf_counter()
        for token in following:
            feed([token])
        end = time.perf_counter()
        return {"prefill_ms": (middle - begin) * 1e3, "decode_ms": (end - middle) * 1e3 / NUM_NEW_TOKENS}

    return sampled(measure)


def time_encoder(feed: Feed) -> Samples:
    """One sentence."""
    sentence = tokens(NUM_PROMPT_TOKENS)

    def measure() -> dict[str, float]:
        begin = time.perf_counter()
        feed(sentence)
        return {"encode_ms": (time.perf_counter() - begin) * 1e3}

    return sampled(measure, warm_ups=5, count=5)


def take_turns(measure: Callable[[], Samples]) -> None:
    """A turn for each line of the input, with the processor time it took, child processes' included."""
    print(json.dumps({"is_open": True}), flush=True)
    for _ in sys.stdin:
        before = os.times()
        samples = measure()
        used = sum(os.times()[:4]) - sum(before[:4])
        print(json.dumps({"samples": samples, "cpu_seconds": used}), flush=True)


def main(
    *,
    make: Callable[[str, Path, Path], None] | None = None,
    open_decoder: OpenDecoder | None = None,
    open_encoder: OpenEncoder | None = None,
    open_clock: Callable[[str, Path], Callable[[], Samples]] | None = None,
    describe: Callable[[Path], dict[str, float]] | None = None,
) -> None:
    """Obey one command line; `open_clock` is for a system that has a clock of its own."""
    action, variant, folder, output_or_kind = sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4]
    if action == "make" and make:
        make(variant, folder, Path(output_or_kind))
        print("{}")
    elif action == "describe" and describe:
        print(json.dumps(describe(folder)))
    elif open_clock:
        take_turns(open_clock(variant, folder))
    elif output_or_kind == "decoder" and open_decoder:
        clear, feed = open_decoder(variant, folder)
        take_turns(lambda: time_decoder(clear, feed))
    elif output_or_kind == "encoder" and open_encoder:
        feed = open_encoder(variant, folder)
        take_turns(lambda: time_encoder(feed))
    else:
        sys.exit(f"no {output_or_kind} here")
