"""A quantized model of pictures beside its original: labels of classifiers, else vectors or outputs.

The pictures are those of the folder that the recipe names, or the bundled held-out ones, of which none is
calibrated on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.evaluation.accuracy import Doubles
from quantkit.evaluation.artifact import OpenArtifact
from quantkit.evaluation.labels import compare_labels
from quantkit.evaluation.measurements import Similarity
from quantkit.evaluation.reference import Reference
from quantkit.evaluation.similarity import measure_similarity
from quantkit.progress import Progress
from quantkit.recipe import Measure
from quantkit.runtime.encoder import Encoder
from quantkit.runtime.graph import Floats
from quantkit.runtime.labels import head_of
from quantkit.runtime.pictures import (
    bundled_pictures,
    pictures_in,
    read_pictures,
    read_preprocessing,
    require_size,
)

BUNDLED, RANDOM = "bundled held-out pictures", "random pixels"
NUM_RANDOM = 8


def picture_paths(measure: Measure) -> tuple[list[Path], str]:
    """(paths, name) of the pictures that accuracy is measured on."""
    if measure.text is None:
        return bundled_pictures("evaluation"), BUNDLED
    folder = Path(measure.text).expanduser()
    return pictures_in(folder, "--text"), folder.name


def measured_pictures(artifact: OpenArtifact, session: Encoder) -> tuple[list[Floats], str]:
    """(pictures as the model reads them, each [C, H, W], their name)."""
    if artifact.recipe.random_weights:
        shape = (NUM_RANDOM, *session.picture_shape)
        return list(np.random.default_rng(0).standard_normal(shape, np.float32)), RANDOM
    paths, name = picture_paths(artifact.recipe.measure)
    preprocessing = read_preprocessing(artifact.folder)
    pictures = [read_pictures([path], preprocessing, channels=session.picture_shape[0])[0] for path in paths]
    for picture_CHW in pictures:
        require_size(picture_CHW.shape[1:], session.picture_size, artifact.folder)
    return pictures, name


def compare_pictures(
    artifact: OpenArtifact, session: Encoder, original: Reference, progress: Progress, *, is_meaningful: bool
) -> Similarity:
    """Compare labels, vectors or states, whichever the model has first."""
    pictures, name = measured_pictures(artifact, session)
    head = head_of(session)
    outputs: tuple[list[Doubles], list[Doubles]] | None = ([], []) if head else None
    reference: Callable[[NDArray[Any]], Floats]
    quantized: Callable[[NDArray[Any]], Floats]
    reference, quantized = original.logits(), session.logits
    pools = session.pools and original.vectors is not None and not head
    if pools and original.vectors:
        reference, quantized = original.vectors(), session.vectors
    with progress.stage("accuracy", total=len(pictures), unit="pictures") as count:
        similarity = measure_similarity(
            reference=reference,
            quantized=quantized,
            rows=pictures,
            text=name,
            are_embeddings=pools,
            is_meaningful=is_meaningful,
            outputs=outputs,
            progress=lambda _: count(1),
        )
    similarity = replace(similarity, of_pictures=True, window=session.context or 1)
    if head is None or outputs is None or head.activation == "Identity" or not is_meaningful:
        return similarity
    labels = compare_labels(*outputs, are_independent=head.activation == "Sigmoid", of_tokens=False)
    return replace(similarity, labels=labels)
