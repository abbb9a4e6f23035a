"""Rows that are computed as they are read, against the whole tensor changed at once by naive numpy."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.quantization.transforms.basis import (
    Centring,
    Diagonal,
    HeadRotation,
    Permutation,
    head_permutation,
)
from quantkit.quantization.transforms.hadamard import random_hadamard
from quantkit.quantization.transforms.source import AddProduct, Along, Fill, TransformedTensors

pytestmark = pytest.mark.once
ROWS, COLUMNS = 24, 12


class Stored:
    """A source that counts what is read of it."""

    def __init__(self, **tensors):
        self.tensors, self.num_rows = tensors, 0

    def has(self, name):
        return name in self.tensors

    def shape(self, name):
        return self.tensors[name].shape

    def source_bytes(self):
        return 17

    def read(self, name, start=0, count=None):
        values = self.tensors[name][start : None if count is None else start + count]
        self.num_rows += len(values)
        return values.astype(np.float32)


def stored():
    random = np.random.default_rng(0)
    return Stored(
        matrix=random.normal(size=(ROWS, COLUMNS)).astype(np.float32),
        vector=random.normal(size=ROWS).astype(np.float32),
    )


def matrix_of(kind, width, seed):
    """(action, the matrix M that it stands for, its transposed inverse), M spelled out naively."""
    random = np.random.default_rng(seed)
    if kind == "diagonal":
        factors = np.exp(random.normal(size=width))
        return Diagonal(factors_I=factors), np.diag(factors), np.diag(1 / factors)
    if kind == "permutation":
        order = random.permutation(width)
        turned = np.eye(width)[:, order]
        return Permutation(order_I=order), turned, turned
    if kind == "heads":
        order = random.permutation(3)
        turned = np.kron(np.eye(3)[:, order], np.eye(width // 3))
        return head_permutation(order, width // 3), turned, turned
    if kind == "centring":
        return Centring(width=width), np.eye(width) - 1 / width, None
    if kind == "head_rotation":
        turns = [np.linalg.qr(random.normal(size=(width // 3, width // 3)))[0] for _ in range(3)]
        whole = np.zeros((width, width))
        for head, turn in enumerate(turns):
            places = slice(head * width // 3, (head + 1) * width // 3)
            whole[places, places] = turn
        return HeadRotation(rotations_HDD=np.stack(turns)), whole, whole
    rotation = random_hadamard(width, seed)
    whole = rotation.signs_I[:, None] * (
        np.kron(*rotation.factors) if len(rotation.factors) == 2 else rotation.factors[0]
    )
    return rotation, whole, whole


KINDS = ("diagonal", "permutation", "heads", "centring", "head_rotation", "rotation")
EDITS = st.lists(
    st.tuples(
        st.sampled_from(KINDS),
        st.integers(0, 1),
        st.booleans(),
        st.booleans(),
        st.integers(0, 1 << 20),
    ),
    min_size=1,
    max_size=4,
)


def make(edits):
    """(edits, the whole tensor after them) for a random list of descriptions."""
    whole = stored().tensors["matrix"].astype(np.float64)
    made = []
    for kind, axis, inverse, in_part, seed in edits:
        size = whole.shape[axis]
        width = size // 2 if in_part else size
        where = np.random.default_rng(seed).permutation(size)[:width] if in_part else None
        action, matrix, inverse_matrix = matrix_of(kind, width, seed)
        backwards = inverse and inverse_matrix is not None
        made.append(Along(axis=axis, action=action, inverse=backwards, where=where))
        turned = np.moveaxis(whole, axis, 1)
        places = slice(None) if where is None else where
        turned[:, places] = turned[:, places] @ (inverse_matrix if backwards else matrix)
        whole = np.moveaxis(turned, 1, axis)
    return tuple(made), whole


@settings(max_examples=150)
@given(edits=EDITS, start=st.integers(0, ROWS - 1), count=st.integers(0, ROWS + 3))
def test_any_rows_are_those_of_the_whole(edits, start, count):
    changes, whole = make(edits)
    tensors = TransformedTensors(base=stored(), edits={"matrix": changes}, dtype=np.float64)
    rows = tensors.read("matrix", start, count)
    np.testing.assert_allclose(rows, whole[start : start + count], rtol=1e-11, atol=1e-12)
    assert rows.dtype == np.float64
    np.testing.assert_allclose(tensors.read("matrix"), whole, rtol=1e-11, atol=1e-12)


@settings(max_examples=50)
@given(first=EDITS, second=EDITS, start=st.integers(0, ROWS - 1), count=st.integers(1, ROWS))
def test_changes_on_changes_round_once(first, second, start, count):
    edits, whole = make([*first, *second])
    once = TransformedTensors(base=stored(), edits={"matrix": edits[: len(first)]})
    twice = once.with_edits({"matrix": edits[len(first) :]}, copies={}, added={}, removed=frozenset())
    rows = twice.read("matrix", start, count)
    assert rows.dtype == np.float32
    limit = 2**-24 * np.abs(whole[start : start + count]) + 1e-12
    assert (np.abs(rows - whole[start : start + count]) <= limit * 1.01).all(), "half a unit of float32"


def test_local_changes_read_only_their_rows():
    edits, whole = make([("diagonal", 0, False, False, 1), ("permutation", 0, False, False, 2),
                         ("rotation", 1, False, False, 3)])  # fmt: skip
    source = stored()
    tensors = TransformedTensors(base=source, edits={"matrix": edits}, dtype=np.float64)
    np.testing.assert_allclose(tensors.read("matrix", 4, 5), whole[4:9], rtol=1e-11)
    assert source.num_rows == 5


def test_a_rotation_of_rows_is_computed_once():
    edits, whole = make([("rotation", 0, False, False, 1)])
    source = stored()
    tensors = TransformedTensors(base=source, edits={"matrix": edits}, dtype=np.float64)
    made = np.concatenate([tensors.read("matrix", start, 5) for start in range(0, ROWS, 5)])
    np.testing.assert_allclose(made, whole, rtol=1e-11, atol=1e-12)
    assert source.num_rows == ROWS


def test_what_is_returned_can_be_written_to():
    edits, whole = make([("rotation", 0, False, False, 1)])
    tensors = TransformedTensors(base=stored(), edits={"matrix": edits}, dtype=np.float64)
    tensors.read("matrix")[:] = 0
    tensors.exact("matrix")[:] = 0
    np.testing.assert_allclose(tensors.read("matrix"), whole, rtol=1e-11, atol=1e-12)


def test_vectors_are_filled_scaled_and_added_to():
    source = stored()
    matrix, vector = source.tensors["matrix"].astype(np.float64), source.tensors["vector"].astype(np.float64)
    gain = np.arange(1.0, ROWS + 1)
    before = TransformedTensors(base=source, dtype=np.float64)
    x = np.arange(COLUMNS) / 7.0
    edits = {
        "vector": (
            Along(axis=0, action=Diagonal(factors_I=gain), inverse=True, offset=1.0),
            AddProduct(tensors=before, weight="matrix", is_transposed=False, vector_I=x),
        ),
        "new": (AddProduct(tensors=before, weight="matrix", is_transposed=True, vector_I=gain),),
    }
    tensors = before.with_edits(edits, copies={}, added={"new": COLUMNS}, removed=frozenset({"gone"}))
    np.testing.assert_allclose(tensors.read("vector"), (vector + 1) / gain - 1 + matrix @ x, rtol=1e-12)
    np.testing.assert_allclose(tensors.read("new", 2, 3), (matrix.T @ gain)[2:5], rtol=1e-12)
    assert tensors.has("new")
    assert tensors.shape("new") == (COLUMNS,)
    filled = tensors.with_edits({"vector": (Fill(value=0.5),)}, copies={}, added={}, removed=frozenset())
    assert (filled.read("vector") == 0.5).all()


def test_copies_names_and_removals():
    source = stored()
    tensors = TransformedTensors(base=source, same={"head": "matrix"}, dtype=np.float64)
    scaled = (Along(axis=1, action=Diagonal(factors_I=np.full(COLUMNS, 2.0))),)
    both = tensors.with_edits({"matrix": scaled}, copies={}, added={}, removed=frozenset())
    assert (both.read("head") == both.read("matrix")).all()
    assert (both.read("head") == 2.0 * source.tensors["matrix"]).all()
    apart = both.with_edits(
        {"head": scaled}, copies={"head": "matrix"}, added={}, removed=frozenset({"vector"})
    )
    assert (apart.read("head") == 4.0 * source.tensors["matrix"]).all()
    assert (apart.read("matrix") == 2.0 * source.tensors["matrix"]).all()
    assert not apart.has("vector")
    assert both.has("vector")
    assert apart.source_bytes() == 17


def test_two_changes_of_one_source_do_not_mix():
    """Both have as many edits, and both need what is kept."""
    source = stored()
    first = TransformedTensors(base=source, dtype=np.float64)
    for name in ("matrix", "vector"):
        whole = source.tensors[name].astype(np.float64)
        made = []
        for seed in (1, 2):
            action, matrix, _ = matrix_of("rotation", ROWS, seed)
            edit = (Along(axis=0, action=action),)
            branch = first.with_edits({name: edit}, copies={}, added={}, removed=frozenset())
            made.append((branch, matrix.T @ whole))
        for branch, wanted in (*made, *made):
            np.testing.assert_allclose(branch.read(name), wanted, atol=1e-12)


def test_threads_see_one_tensor():
    edits, whole = make([("rotation", 0, False, False, 1)])
    tensors = TransformedTensors(base=stored(), edits={"matrix": edits}, dtype=np.float64)
    found = {}

    def read(start):
        found[start] = tensors.read("matrix", start, 3)

    threads = [threading.Thread(target=read, args=(start,)) for start in range(0, ROWS, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_allclose(np.concatenate([found[s] for s in range(0, ROWS, 3)]), whole, atol=1e-12)
