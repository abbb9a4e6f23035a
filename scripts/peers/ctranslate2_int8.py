"""CTranslate2 with INT8 weights, timed through its generator: it offers no single step with a cache.

The prompt's time is that of one new token, and a step's is (33 new tokens - 1 new token) / 32. Choosing the
most likely token is therefore in its times, a few hundredths of a millisecond each.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import ctranslate2  # type: ignore[import-not-found]
import timing


def make(variant: str, source: Path, output: Path) -> None:
    """Convert and quantize at once, as `ct2-transformers-converter --quantization int8` does."""
    ctranslate2.converters.TransformersConverter(str(source)).convert(
        str(output), quantization="int8", force=True
    )


def open_generation(variant: str, folder: Path) -> Callable[[], timing.Samples]:
    """A short and a long answer."""
    generator = ctranslate2.Generator(
        str(folder), device="cpu", compute_type="int8", intra_threads=timing.NUM_THREADS
    )
    words = vocabulary(folder)
    prompt = [words[token] for token in timing.tokens(timing.NUM_PROMPT_TOKENS)]

    def answer_ms(length: int) -> float:
        begin = time.perf_counter()
        results = generator.generate_batch(
            [prompt],
            max_length=length,
            min_length=length,
            sampling_topk=1,
            include_prompt_in_result=False,
        )
        elapsed_ms = (time.perf_counter() - begin) * 1e3
        assert len(results[0].sequences_ids[0]) == length
        return elapsed_ms

    def measure() -> dict[str, float]:
        first_ms, all_ms = answer_ms(1), answer_ms(1 + timing.NUM_NEW_TOKENS)
        return {"prefill_ms": first_ms, "decode_ms": (all_ms - first_ms) / timing.NUM_NEW_TOKENS}

    return partial(timing.sampled, measure)


def vocabulary(folder: Path) -> list[str]:
    """Prompts are given as the words of the model's own list."""
    words: list[str] = json.loads((folder / "vocabulary.json").read_text(encoding="utf-8"))
    return words


if __name__ == "__main__":
    timing.main(make=make, open_clock=open_generation)
