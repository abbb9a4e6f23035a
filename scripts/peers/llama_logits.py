"""llama.cpp's formats of a GGUF model, and their logits on given tokens (PyPI package `llama-cpp-python`).

    python llama_logits.py make MODEL.gguf FORMAT OUTPUT.gguf
    python llama_logits.py logits MODEL.gguf TOKENS.npy LOGITS.npy
    python llama_logits.py time MODEL.gguf

Tokens are windows [N, T]; logits [N, T, V] are float32.
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import llama_cpp  # type: ignore[import-not-found]
import numpy as np

FORMATS = {"F32": 0, "Q4_0": 2, "Q8_0": 7, "Q4_K_M": 15}
lib: Any = llama_cpp


def make(model: str, name: str, output: str) -> None:
    """Quantize a GGUF file; F32 of a quantized file is the float model that it stands for."""
    parameters = lib.llama_model_quantize_default_params()
    parameters.ftype, parameters.allow_requantize, parameters.nthread = FORMATS[name], True, 1
    if lib.llama_model_quantize(model.encode(), output.encode(), ctypes.byref(parameters)):
        sys.exit(f"llama.cpp did not make {name}")


def opened(path: str, length: int, *, is_repacked: bool = True) -> Any:
    """A context for `length` tokens, on all cores or the threads that OMP_NUM_THREADS names."""
    loading = lib.llama_model_default_params()
    loading.use_extra_bufts = is_repacked
    model = lib.llama_model_load_from_file(path.encode(), loading)
    parameters = lib.llama_context_default_params()
    parameters.n_ctx = parameters.n_batch = length
    threads = int(os.environ.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0))))
    parameters.n_threads = parameters.n_threads_batch = threads
    return lib.llama_init_from_model(model, parameters)


def decode(context: Any, batch: Any, tokens: Sequence[int], first: int, *, is_last_alone: bool) -> None:
    batch.n_tokens = len(tokens)
    for row, token in enumerate(tokens):
        batch.token[row], batch.pos[row] = int(token), first + row
        batch.n_seq_id[row], batch.seq_id[row][0] = 1, 0
        batch.logits[row] = not is_last_alone or row == len(tokens) - 1
    if lib.llama_decode(context, batch):
        sys.exit(f"llama.cpp did not read {len(tokens)} tokens")


def write_logits(path: str, tokens: str, output: str) -> None:
    """Each window is read into an empty cache."""
    windows_NT = np.load(tokens)
    num_windows, length = windows_NT.shape
    # Repacked for AMX, Q4_0 of version 0.3.16 predicts noise (KL 2.6): accuracy is that of plain kernels.
    context, batch = opened(path, length, is_repacked=False), lib.llama_batch_init(length, 0, 1)
    vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(lib.llama_get_model(context)))
    logits = np.lib.format.open_memmap(output, "w+", np.float32, (num_windows, length, vocab_size))
    for number, window_T in enumerate(windows_NT):
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        decode(context, batch, window_T, 0, is_last_alone=False)
        logits[number] = np.ctypeslib.as_array(lib.llama_get_logits(context), (length, vocab_size))
    logits.flush()


def show_times(path: str, prompt: int = 128, num_new: int = 32, samples: int = 5) -> None:
    """Medians of a prompt and of a token after it, in milliseconds, after one warm-up."""
    context, batch = opened(path, prompt + num_new), lib.llama_batch_init(prompt, 0, 1)
    prompts, steps = [], []
    for _ in range(samples + 1):
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        begin = time.perf_counter()
        decode(context, batch, range(1, prompt + 1), 0, is_last_alone=True)
        lib.llama_synchronize(context)
        middle = time.perf_counter()
        for step in range(num_new):
            decode(context, batch, [7], prompt + step, is_last_alone=True)
            lib.llama_synchronize(context)
        prompts.append(1e3 * (middle - begin))
        steps.append(1e3 * (time.perf_counter() - middle) / num_new)
    print(json.dumps({"prompt": statistics.median(prompts[1:]), "token": statistics.median(steps[1:])}))


if __name__ == "__main__":
    lib.llama_backend_init()
    {"make": make, "logits": write_logits, "time": show_times}[sys.argv[1]](*sys.argv[2:])
