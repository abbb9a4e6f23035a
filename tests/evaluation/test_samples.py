"""Answers of two models to the same texts: where continuations part, and which text is nearest."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from quantkit.evaluation.samples import lines_of, take_samples

pytestmark = pytest.mark.once
WORDS = ["<end>", *(f"word{number}" for number in range(1, 20))]
TEXT = "\n\n".join(f"{number} a line that is long enough to be taken as a prompt" for number in range(9))


class WordText:
    """A tokenizer of one token a word: the first character of a line decides all of its tokens."""

    stop_ids = frozenset({0})

    def encode(self, text):
        return [1 + int(text[0])] * 3

    def decode(self, ids):
        return "".join(f" {WORDS[number]}" for number in ids if number)


@dataclass
class Counting:
    """A decoder that answers with its last token plus a step; from `turns` on, with another step."""

    turns: int = 99
    generates: bool = True
    context: int | None = 64
    fixed_length: int | None = None
    vocab_size: int | None = len(WORDS)

    def begin(self, prompts, num_new):
        assert all(len(prompt) + num_new <= self.context for prompt in prompts)
        self.last = [prompt[-1] for prompt in prompts]
        self.count = 0
        return self

    def read(self):
        self.count += 1
        step = 1 if self.count <= self.turns else 2
        logits = np.zeros((len(self.last), len(WORDS)), np.float32)
        for row, token in enumerate(self.last):
            logits[row, token + step if token + step < len(WORDS) else 0] = 1
        return logits

    def step(self, tokens, open_rows):
        self.last = list(tokens)
        return self.read()


@dataclass
class Vectors:
    """An encoder of two states a text: of an angle for each first token, and its opposite noise."""

    angles: dict[int, float]
    generates: bool = False
    context: int | None = None
    fixed_length: int | None = None

    def logits(self, ids):
        angle = self.angles[int(ids[0, 0])]
        state = np.array([np.cos(angle), np.sin(angle)])
        return np.stack([state + 1, state - 1])[None].astype(np.float32)


def test_continuations_part_at_the_first_token_that_differs(tmp_path):
    taken = take_samples(Counting(), Counting(turns=4), WordText(), TEXT, folder=tmp_path)
    assert taken.kind == "continuation"
    first = taken.samples[0]
    assert first.first_difference == 4
    assert first.reference[:5] == (" word2", " word3", " word4", " word5", " word6")
    assert first.quantized[:5] == (" word2", " word3", " word4", " word5", " word7")
    same = take_samples(Counting(), Counting(), WordText(), TEXT, folder=tmp_path)
    assert all(sample.first_difference is None for sample in same.samples)
    assert same.samples[0].reference[-1] == "", "the token that ends a text has none"


def test_an_encoder_names_the_nearest_other_text(tmp_path):
    angles = {1 + number: 0.04 * number**2 for number in range(9)}
    moved = {**angles, 3: 0.34}  # text 2, from 0.16 to 0.34: nearer to text 3 (0.36) than to 1 (0.04)
    taken = take_samples(Vectors(angles), Vectors(moved), WordText(), TEXT, folder=tmp_path)
    assert taken.kind == "nearest text"
    lines = lines_of(TEXT, 32)
    changed = {
        sample.text: (sample.reference[0], sample.quantized[0])
        for sample in taken.samples
        if sample.first_difference == 0
    }
    assert changed[lines[2]] == (lines[1], lines[3])
    assert lines[8] not in changed


def test_lines_are_distinct_long_and_spread():
    text = "\n".join(["short", *(f"{number:03} {'x' * 40}" for number in range(100)), f"000 {'x' * 40}"])
    lines = lines_of(text, 4)
    assert [line[:3] for line in lines] == ["000", "025", "050", "075"]
    assert lines_of("short\nlines", 4) == []


@pytest.mark.parametrize("context", [20, 64])
def test_prompts_and_answers_fit_the_shorter_context(context, tmp_path):
    taken = take_samples(Counting(), Counting(context=context), WordText(), TEXT, folder=tmp_path)
    assert taken.samples
