"""The error of the user's input: four parts for a program, one line for a person."""

from __future__ import annotations

import pickle

import pytest

from quantkit.errors import InputError

pytestmark = pytest.mark.once


def test_parts_are_attributes_and_the_line_joins_them():
    error = InputError("'-1' is\nno size", where="--min-dim", allowed="1 or more", next_step="use 768")
    assert (error.what, error.where) == ("'-1' is\nno size", "--min-dim")
    assert (error.allowed, error.next_step) == ("1 or more", "use 768")
    assert str(error) == "--min-dim: '-1' is no size; allowed: 1 or more; next: use 768"
    assert isinstance(error, ValueError)


def test_absent_parts_are_empty_and_not_in_the_line():
    error = InputError("cannot be read")
    assert (error.where, error.allowed, error.next_step, str(error)) == ("", "", "", "cannot be read")


def test_parts_survive_another_process():
    copied = pickle.loads(pickle.dumps(InputError("wrong", where="scheme", next_step="read the list")))
    assert (copied.what, copied.where, copied.next_step) == ("wrong", "scheme", "read the list")
    assert str(copied) == "scheme: wrong; next: read the list"
