"""Pictures to vectors or logits: read as the artifact's preprocessing says, and run a few at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from quantkit.errors import InputError
from quantkit.runtime.encoder import Encoder
from quantkit.runtime.graph import Floats
from quantkit.runtime.pictures import open_picture, read_pictures, read_preprocessing, require_size

BATCH = 8


def picture_vectors(encoder: Encoder, paths: Sequence[Path]) -> Floats:
    """One vector a picture, [N, D]; of a classifier its logits. All files are opened before any is run."""
    if not paths:
        raise InputError("there is no picture", where="pictures", allowed="one picture or more")
    preprocessing = read_preprocessing(encoder.folder)
    require_size(preprocessing.output, encoder.picture_size, encoder.folder)
    for path in paths:
        open_picture(path)
    values = []
    for start in range(0, len(paths), BATCH):
        batch = paths[start : start + BATCH]
        pictures = read_pictures(batch, preprocessing, channels=encoder.picture_shape[0])
        require_size(pictures.shape[2:], encoder.picture_size, encoder.folder)
        values.append(encoder.vectors(pictures))
    return np.concatenate(values)
