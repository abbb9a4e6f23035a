"""Texts for accuracy: whatever is no text in UTF-8 is refused in one line."""

from __future__ import annotations

import pytest

from quantkit.errors import InputError
from quantkit.evaluation.text import read_text
from quantkit.recipe import Measure

pytestmark = pytest.mark.once


def test_a_text_comes_with_the_name_of_its_file(tmp_path):
    path = tmp_path / "held-out.txt"
    path.write_text("Zürich\n", encoding="utf-8")
    assert read_text(Measure(text=str(path))) == ("Zürich\n", "held-out.txt")


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (None, "cannot be read"),
        (b" \n", "the text is empty"),
        ("plain".encode("utf-16-le"), "holds zero bytes"),
        ("Zürich".encode("latin-1"), "cannot be read"),
    ],
)
def test_any_other_file_is_refused(tmp_path, content, fault):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=fault) as caught:
        read_text(Measure(text=str(path)))
    assert "--text" in caught.value.next_step
    assert "\n" not in str(caught.value)
