"""A quantized encoder beside its original, as its users use it.

Classifiers are compared by their labels, rerankers by the order of passages, sentence models by their vectors
and the order of passages by cosine, other encoders by their outputs on running text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from quantkit.evaluation.accuracy import Doubles, Ints, Logits
from quantkit.evaluation.artifact import OpenArtifact
from quantkit.evaluation.labels import compare_labels
from quantkit.evaluation.measurements import Similarity
from quantkit.evaluation.ranking import compare_rankings
from quantkit.evaluation.reference import PairLogits, Reference
from quantkit.evaluation.similarity import measure_similarity, unit, windows_of
from quantkit.evaluation.text import QUESTIONS, bundled_questions, embedded_rows, read_text, within
from quantkit.progress import Progress
from quantkit.runtime.encoder import Encoder
from quantkit.runtime.labels import Head, head_of, pair_rows
from quantkit.runtime.sentence import prompt_of, token_rows
from quantkit.runtime.tokenizer import open_text

FEWEST_QUERIES, FEWEST_PASSAGES = 2, 10  # of a ranking


def compare_encoder(
    artifact: OpenArtifact,
    tokens: tuple[Ints, str],
    original: Reference,
    progress: Progress,
    *,
    is_meaningful: bool,
) -> Similarity:
    """Compare an encoder with its original; `tokens` are the ids of the recipe's text and its name."""
    session = artifact.session
    assert isinstance(session, Encoder)
    assert not session.reads_pictures, "compare_pictures does"
    head = head_of(session) if is_meaningful else None
    if head and head.ranks and original.pair_logits:
        return _compare_reranker(artifact, session, original.pair_logits(), progress)
    if head and not head.ranks and head.activation != "Identity":  # numbers of a regression are no labels
        return _compare_classifier(artifact, session, head, original, progress)
    if session.pools and original.vectors:
        return _compare_vectors(artifact, session, tokens, original.vectors(), progress, is_meaningful)
    rows = _windows(artifact, tokens)
    with progress.stage("accuracy", total=sum(map(len, rows)), unit="tokens") as count:
        return measure_similarity(
            reference=original.logits(),
            quantized=session.logits,
            rows=rows,
            text=tokens[1],
            is_meaningful=is_meaningful,
            progress=count,
        )


def _windows(artifact: OpenArtifact, tokens: tuple[Ints, str]) -> list[Ints]:
    ids, text = tokens
    measure, context = artifact.recipe.measure, artifact.session.fixed_length or artifact.context
    return windows_of(ids, min(measure.window or measure.prompt, context, len(ids)), text)


def _compare_classifier(
    artifact: OpenArtifact, session: Encoder, head: Head, original: Reference, progress: Progress
) -> Similarity:
    """Labels of the lines of the user's text, or of the bundled questions and passages."""
    measure = artifact.recipe.measure
    passages, questions = bundled_questions()
    texts, name = [*(question for question, _ in questions), *passages], QUESTIONS
    if measure.text:
        lines, name = read_text(measure)
        texts = [line for line in lines.splitlines() if line.strip()]
    rows = within(pair_rows(session, open_text(artifact.folder), None, texts)[0], measure.max_tokens)
    outputs: tuple[list[Doubles], list[Doubles]] = ([], [])
    with progress.stage("accuracy", total=sum(map(len, rows)), unit="tokens") as count:
        similarity = measure_similarity(
            reference=original.logits(),
            quantized=session.logits,
            rows=rows,
            text=name,
            outputs=outputs,
            progress=count,
        )
    are_independent = head.activation == "Sigmoid"
    labels = compare_labels(*outputs, are_independent=are_independent, of_tokens=head.of_tokens)
    return replace(similarity, labels=labels)


def _compare_reranker(
    artifact: OpenArtifact, session: Encoder, original: PairLogits, progress: Progress
) -> Similarity:
    """Rankings of the passages that a search by words finds for each bundled question."""
    tokenizer, (passages, questions) = open_text(artifact.folder), bundled_questions()
    rows: list[Ints] = []
    num_candidates = len(questions[0][1])
    for question, candidates in questions:
        pairs = pair_rows(session, tokenizer, question, [passages[index] for index in candidates])
        rows += [np.array(pair, np.int64) for pair in zip(*pairs, strict=True)]
    num_rows = len(within(rows, artifact.recipe.measure.max_tokens))
    rows = rows[: max(1, num_rows // num_candidates) * num_candidates]
    outputs: tuple[list[Doubles], list[Doubles]] = ([], [])
    with progress.stage("accuracy", total=sum(row.shape[-1] for row in rows), unit="tokens") as count:
        similarity = measure_similarity(
            reference=_of_rows(original),
            quantized=_of_rows(session.logits),
            rows=rows,
            text=QUESTIONS,
            outputs=outputs,
            progress=count,
        )
    scores = [list(np.concatenate(values).reshape(-1, num_candidates)) for values in outputs]
    return replace(similarity, ranking=compare_rankings(*scores, of_pairs=True))


def _of_rows(logits: PairLogits) -> Logits:
    """Logits of rows of token ids above token types, [1, 2, S]."""
    return lambda rows: logits(rows[:, 0], rows[:, 1])


def _compare_vectors(
    artifact: OpenArtifact,
    session: Encoder,
    tokens: tuple[Ints, str],
    original: Logits,
    progress: Progress,
    is_meaningful: bool,
) -> Similarity:
    """Vectors of the recipe's text, and rankings of all bundled passages by cosine."""
    measure = artifact.recipe.measure
    rows = embedded_rows(measure, session, artifact.folder) if is_meaningful else _windows(artifact, tokens)
    queries, passages = _searched(artifact, session) if is_meaningful else ([], [])
    total = sum(map(len, [*rows, *queries, *passages]))
    with progress.stage("accuracy", total=total, unit="tokens") as count:
        similarity = measure_similarity(
            reference=original,
            quantized=session.vectors,
            rows=rows,
            are_embeddings=True,
            text=tokens[1],
            is_meaningful=is_meaningful,
            progress=count,
        )
        if len(queries) < FEWEST_QUERIES or len(passages) < FEWEST_PASSAGES:
            return similarity
        cosines = _cosines((original, session.vectors), queries, passages, count)
    return replace(similarity, ranking=compare_rankings(*cosines))


def _searched(artifact: OpenArtifact, session: Encoder) -> tuple[list[Ints], list[Ints]]:
    """Token ids of questions and passages, behind the model's prompts for them, up to the recipe's tokens."""
    tokenizer, (passages, questions) = open_text(artifact.folder), bundled_questions()
    texts = {"query": [question for question, _ in questions], "document": passages}
    prompts = {"query": ("query",), "document": ("document", "passage", "corpus")}
    parts = [token_rows(session, tokenizer, texts[part], prompt_of(session, prompts[part])) for part in texts]
    rows = within([*parts[0], *parts[1]], artifact.recipe.measure.max_tokens)
    return rows[: len(parts[0])], rows[len(parts[0]) :]


def _cosines(
    models: Sequence[Logits],
    queries: Sequence[Ints],
    passages: Sequence[Ints],
    progress: Callable[[int], None],
) -> list[list[Doubles]]:
    """Cosines of each query with all passages, for each model."""
    vectors: list[list[Doubles]] = [[] for _ in models]
    for row in (*queries, *passages):
        for model, values in zip(models, vectors, strict=True):
            values.append(model(row[None])[0].astype(np.float64))
        progress(len(row))
    units_MND = [unit(np.stack(values)) for values in vectors]
    return [list(unit_ND[: len(queries)] @ unit_ND[len(queries) :].T) for unit_ND in units_MND]
