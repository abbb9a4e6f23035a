"""Load or run one model alone in a process, whose peak memory is then the model's.

python -m quantkit.runtime.memory_trial empty|load|run FOLDER PROMPT DECODE THREADS
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from quantkit.runtime.graph import open_graph
from quantkit.runtime.session import example_of, open_session


def main(arguments: list[str]) -> None:
    what, folder, prompt, decode, threads = arguments
    if what == "load":
        _ = [open_graph(path, threads=int(threads)) for path in sorted(Path(folder).glob("*.onnx"))]
    elif what == "run":
        session = open_session(Path(folder), threads=int(threads))
        ids = np.ones((1, int(prompt)), np.int64)
        if not session.generates:
            session.logits(example_of(session, ids))
            return
        batch = session.begin(ids.tolist(), int(decode))
        batch.read()
        for _ in range(int(decode)):
            batch.step(ids[0, :1], (0,))


if __name__ == "__main__":
    main(sys.argv[1:])
