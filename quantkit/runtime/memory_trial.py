"""One model alone in a process: loaded, or loaded and run, so that the process's peak memory is the model's.

python -m quantkit.runtime.memory_trial empty|load|run|encode FOLDER PROMPT DECODE THREADS
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from quantkit.runtime.encoder import encode, open_encoder
from quantkit.runtime.session import open_session, start, step
from quantkit.runtime.static_decoder import StaticDecoder, begin
from quantkit.runtime.static_decoder import step as step_static
from quantkit.runtime.traced import Traced, go_on, open_generator, read_prompt


def main(arguments: list[str]) -> None:
    """Do as much as the first argument says."""
    what, folder, prompt, decode, threads = arguments
    text, token = np.ones((1, int(prompt)), np.int64), np.ones((1, 1), np.int64)
    if what == "load":
        _ = [open_session(path, threads=int(threads)) for path in sorted(Path(folder).glob("*.onnx"))]
    elif what == "encode":
        encode(open_encoder(Path(folder), threads=int(threads)), text)
    elif what == "run":
        model = open_generator(Path(folder), threads=int(threads))
        if isinstance(model, Traced):
            traced, _ = read_prompt(model, text)
            for _ in range(int(decode)):
                go_on(traced, token)
            return
        if isinstance(model, StaticDecoder):
            begun, _ = begin(model, text[0])
            for _ in range(int(decode)):
                step_static(begun, 1)
            return
        state = start(model, batch=1, capacity=int(prompt) + int(decode))
        step(state, text)
        for _ in range(int(decode)):
            step(state, token)


if __name__ == "__main__":
    main(sys.argv[1:])
