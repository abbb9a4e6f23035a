"""Where calibration tokens come from, and everything that can be wrong with what a user gives."""

from __future__ import annotations

import re
import unicodedata

import numpy as np
import pytest

from quantkit.errors import InputError
from quantkit.evaluation.categories import CATEGORIES
from quantkit.model.inspect import inspect
from quantkit.quantization.calibration.tokens import calibration_tokens, read_text

pytestmark = pytest.mark.once


def encode(text: str) -> list[int]:
    return list(text.encode())


def read(**options):
    return calibration_tokens(**{"encode": encode, "vocab_size": 256, **options})


def places(windows, ids):
    """Where each window begins in a text whose tokens are all different."""
    return [int(np.flatnonzero(ids == window[0])[0]) for window in windows]


def test_the_bundled_text_gives_seeded_windows_spread_over_it():
    one, again, other = read(), read(), read(seed=1)
    assert one.shape == (32, 512)
    assert one.dtype == np.int64
    assert (one == again).all()
    assert (one != other).any()


def test_windows_do_not_overlap_and_cover_the_whole_text(tmp_path):
    ids = np.arange(10_000)
    np.save(tmp_path / "ids.npy", ids)
    for seed in range(20):
        windows = read(source=tmp_path / "ids.npy", vocab_size=10_000, num_windows=9, length=100, seed=seed)
        begins = places(windows, ids)
        assert all((window == np.arange(b, b + 100)).all() for b, window in zip(begins, windows, strict=True))
        assert (np.diff(begins) >= 100).all()
        assert [begin * 9 // 10_000 for begin in begins] == list(range(9)), "one from each ninth"


def test_a_short_text_gives_fewer_windows(tmp_path):
    (tmp_path / "text").write_text("x" * 350)
    assert read(source=tmp_path / "text", length=100).shape == (3, 100)
    assert read(source=tmp_path / "text", length=350).shape == (1, 350)
    assert read(source=tmp_path / "text", length=350, context=70).shape == (5, 70)


@pytest.mark.parametrize("dtype", [np.int32, np.uint16, np.int64, np.uint64])
def test_ids_from_a_file(tmp_path, dtype):
    np.save(tmp_path / "flat.npy", np.arange(200).astype(dtype))
    assert read(source=tmp_path / "flat.npy", length=50, num_windows=2).shape == (2, 50)
    rows = np.arange(240).reshape(8, 30).astype(dtype)
    np.save(tmp_path / "rows.npy", rows)
    assert (read(source=tmp_path / "rows.npy") == rows).all(), "rows are windows already"
    assert read(source=tmp_path / "rows.npy", length=10).shape == (24, 10)
    chosen = read(source=tmp_path / "rows.npy", num_windows=4)
    assert [row[0] // 60 for row in chosen] == [0, 1, 2, 3], "one from each quarter"


def write(path, content):
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        np.save(path, content)
    return path


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", None, "cannot be read"),
        ("a.txt", b"", "empty"),
        ("a.txt", b" \n\t ", "empty"),
        ("a.txt", b"short", "5 tokens for calibration, 512 are needed"),
        ("a.txt", "Z\u00fcrich".encode("latin-1") * 200, "UTF-8"),
        ("a.txt", "plain".encode("utf-16") * 200, "UTF-8"),
        ("a.txt", "plain".encode("utf-16-le") * 200, "UTF-8"),
        ("a.npy", None, "cannot be read"),
        ("a.npy", b"no array", "cannot be read"),
        ("a.npy", np.ones(600), "float64"),
        ("a.npy", np.zeros((1, 1, 600), np.int64), "3 dimensions"),
        ("a.npy", np.arange(600), "0 to 255"),
        ("a.npy", -np.ones(600, np.int64), "0 to 255"),
        ("a.npy", np.full(600, 2**64 - 1, np.uint64), "0 to 255"),
        ("a.npy", np.zeros(100, np.int64), "100 tokens for calibration, 512 are needed"),
        ("a.npy", np.zeros(0, np.int64), "0 tokens for calibration"),
        ("a.npy", np.zeros((0, 600), np.int64), "0 tokens for calibration"),
        ("a.npy", np.zeros((5, 0), np.int64), "0 tokens for calibration"),
        ("a.npy", np.array([{}]), "cannot be read"),
    ],
)
def test_bad_input_is_one_clear_line(tmp_path, name, content, said):
    path = write(tmp_path / name, content)
    with pytest.raises(InputError, match=said) as caught:
        read(source=path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_is_no_text(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        read(source=tmp_path)


def test_a_foreign_tokenizer_is_refused():
    with pytest.raises(InputError, match="vocabulary"):
        read(vocab_size=50)


@pytest.mark.parametrize("options", [{"num_windows": 0}, {"length": 0}, {"context": 0}])
def test_no_windows_are_refused(options):
    with pytest.raises(InputError, match="1 or more"):
        read(**options)


@pytest.mark.parametrize(
    ("model", "length"),
    [("gpt2", 1024), ("roberta-base", 512), ("opt-125m", 2048), ("gemma-3-1b", 32768), ("t5-small", 512)],
)
def test_the_context_of_a_model(model, length):
    """RoBERTa and OPT count positions from 2; only RoBERTa's config counts those two rows too."""
    assert inspect(model).context == length


def test_the_bundled_text_holds_code_and_many_scripts_in_any_quarter():
    text = read_text(None, bundled="calibration/calibration.txt", flag="")
    assert len(text.encode()) < 300_000
    everywhere = set[str]()
    for part in range(4):
        quarter = text[part * len(text) // 4 : (part + 1) * len(text) // 4]
        scripts = {unicodedata.name(char, "?").split()[0] for char in quarter if char.isalpha()}
        assert {"LATIN", "CYRILLIC"} < scripts
        assert len(scripts) > 5
        everywhere |= scripts
        assert "    return " in quarter
    assert {"CJK", "HANGUL", "HIRAGANA", "DEVANAGARI", "THAI", "HEBREW", "GREEK"} < everywhere


@pytest.mark.parametrize(
    "measured",
    ["demo/evaluation.txt", *(f"categories/{name.replace(' ', '-')}.txt" for name in CATEGORIES)],
)
def test_the_bundled_calibration_text_shares_no_phrase_with_a_measured_text(measured):
    phrases = [
        {tuple(words[at : at + 8]) for at in range(len(words) - 7)}
        for words in (
            re.findall(r"\w+", read_text(None, bundled=name, flag="").lower())
            for name in ("calibration/calibration.txt", measured)
        )
    ]
    assert not phrases[0] & phrases[1]
