"""A live transformers module as a source, saved to a temporary folder.

The folder costs disk space, and every feature works without a second path through the pipeline: tracing,
references in transformers, streaming of blocks, fingerprints. The module itself is not changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quantkit.errors import InputError
from quantkit.model.load import Source, open_source
from quantkit.runtime.machine.cache import cache_folder
from quantkit.runtime.machine.disk import (
    OTHER_CACHE,
    OTHER_TEMPORARY,
    require_free,
    temporary_folder,
    writing,
)


@contextmanager
def saved_model(model: Any, tokenizer: Any) -> Iterator[tuple[Source, str | None]]:
    """(the source of a live module and its tokenizer, the name or path that it was loaded from)."""
    if not hasattr(model, "save_pretrained"):
        raise InputError(
            f"a {type(model).__name__} cannot be saved",
            where="model",
            allowed="a transformers model (PreTrainedModel), a folder or a name",
        )
    path = str(getattr(model.config, "name_or_path", "")) or None
    name = Path(path).name if path else type(model).__name__
    with temporary_folder() as parent:
        folder = parent / name
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
        require_free(folder, num_bytes, what="the model's copy", next_step=OTHER_TEMPORARY)
        model.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        yield open_source(str(folder)), path


def keep_texts(texts: Sequence[str]) -> Path:
    """A file of the cache with these texts, so that the recipe which names it can be run again."""
    if isinstance(texts, Mapping) or not all(isinstance(text, str) for text in texts):
        raise InputError(
            f"calibration is a {type(texts).__name__} and not texts",
            where="quantize",
            allowed="a list of strings, or the path of a text file or of token ids in .npy",
            next_step="windows and lengths are options of their own: calibration_windows=8",
        )
    content = "\n\n".join(texts)
    digest = hashlib.sha256(content.encode()).hexdigest()[:16]
    path = cache_folder() / "calibration" / f"{digest}.txt"
    with writing(cache_folder(), next_step=OTHER_CACHE):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    return path
