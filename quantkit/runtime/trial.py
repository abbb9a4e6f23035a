"""One model alone in a process: loaded, or loaded and run, so that the process's peak memory is the model's.

python -m quantkit.runtime.trial empty|load|run|encode FOLDER PROMPT DECODE THREADS
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from quantkit.runtime.encoder import encode, open_encoder
from quantkit.runtime.session import open_decoder, start, step


def main(arguments: list[str]) -> None:
    """Do as much as the first argument says."""
    what, folder, prompt, decode, threads = arguments
    if what == "empty":
        return
    if what in ("load", "encode"):
        encoder = open_encoder(Path(folder), threads=int(threads))
        if what == "encode":
            encode(encoder, np.ones((1, int(prompt)), np.int64))
        return
    decoder = open_decoder(Path(folder), threads=int(threads))
    state = start(decoder, batch=1, capacity=int(prompt) + int(decode))
    step(state, np.ones((1, int(prompt)), np.int64))
    for _ in range(int(decode)):
        step(state, np.ones((1, 1), np.int64))


if __name__ == "__main__":
    main(sys.argv[1:])
