"""The tokenizer in a GGUF file, as the files that transformers and tokenizers open.

Metadata hold vocabulary and merges, and of the rule that cuts a text into words only a name. The rules of the
names below are the published tokenizers'; a name without a row is refused, since a text that is cut
otherwise becomes other tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from quantkit.errors import InputError
from quantkit.files import reading
from quantkit.model.gguf.file import GgufFile

KEY = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # types of tokens
SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Words:
    """How a text is cut into words before merging."""

    pattern: str | None = None  # None: GPT-2's
    splits_digits: bool = False
    composes: bool = False  # Unicode's NFC before
    keeps_whole: bool = False  # a word that is a token is not merged
    begins: bool = False  # with the bos token, where the file does not say so


WORDS: dict[str, Words] = {
    "gpt-2": Words(),
    "smollm": Words(splits_digits=True),
    "llama-bpe": Words(pattern=LLAMA3, keeps_whole=True, begins=True),
    "qwen2": Words(pattern=QWEN2, composes=True),
}
REMEDY = "put the tokenizer.json of the original beside the file"


def write_tokenizer(file: GgufFile, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    kind = file.metadata.get(f"{KEY}model")
    if kind is None:
        raise InputError("it holds no tokenizer", where=str(file.path), next_step=REMEDY)
    if kind not in MAKERS:
        raise InputError(
            f"its tokenizer is of the kind '{kind}'",
            where=str(file.path),
            allowed=", ".join(MAKERS),
            next_step=REMEDY,
        )
    with reading(file.path, "its tokenizer is damaged", next_step=REMEDY):
        tokens = _strings(file, "tokens")
        special = _special_tokens(file, tokens)
        tokenizer, begins = MAKERS[kind](file, tokens)
        _add_tokens(tokenizer, file, tokens)
        bos = special.get("bos_token")
        begins = bool(file.metadata.get(f"{KEY}add_bos_token", begins)) and bos is not None
        if begins:
            tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{bos} $A",
                pair=f"{bos} $A {bos}:1 $B:1",
                special_tokens=[(bos, tokens.index(str(bos)))],
            )
        tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **special,
    }
    template = file.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        settings["chat_template"] = template
    text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _strings(file: GgufFile, name: str) -> list[str]:
    values = file.metadata.get(f"{KEY}{name}")
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise TypeError(f"{KEY}{name} is no list of strings")
    return values


def _types(file: GgufFile, tokens: list[str]) -> list[int]:
    types: list[int] = file.metadata.get(f"{KEY}token_type", [NORMAL] * len(tokens))
    if len(types) != len(tokens):
        raise ValueError(f"{len(types)} types of {len(tokens)} tokens")
    return types


def _special_tokens(file: GgufFile, tokens: list[str]) -> dict[str, str]:
    ids = {f"{name}_token": file.metadata.get(f"{KEY}{key}_token_id") for name, key in SPECIAL.items()}
    return {name: tokens[number] for name, number in ids.items() if number is not None}


def _add_tokens(tokenizer: Tokenizer, file: GgufFile, tokens: list[str]) -> None:
    """Tokens that are found in a text before it is cut."""
    added = {CONTROL: True, USER_DEFINED: False, UNKNOWN: True}
    for token, kind in zip(tokens, _types(file, tokens), strict=True):
        if kind in added:
            tokenizer.add_tokens([AddedToken(token, special=added[kind], normalized=False)])


def _byte_level(file: GgufFile, tokens: list[str]) -> tuple[Tokenizer, bool]:
    """(BPE on bytes with the file's merges, whether texts begin with the bos token)."""
    name = file.metadata.get(f"{KEY}pre", "")
    if name not in WORDS:
        raise InputError(
            f"its tokenizer cuts words by the rule '{name}'",
            where=str(file.path),
            allowed=", ".join(WORDS),
            next_step=REMEDY,
        )
    words = WORDS[name]
    merges = [tuple(merge.split(" ")) for merge in _strings(file, "merges")]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=words.keeps_whole))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if words.splits_digits else []
    if words.pattern:
        steps.append(pre_tokenizers.Split(Regex(words.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if words.composes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, words.begins


def _sentencepiece(file: GgufFile, tokens: list[str]) -> tuple[Tokenizer, bool]:
    """(BPE whose merges follow from the scores of pieces, True).

    SentencePiece joins the neighbours whose piece has the highest score, so every cut of a piece into two
    pieces is a merge, ordered by the score of the whole.
    """
    scores = [float(score) for score in file.metadata[f"{KEY}scores"]]
    types = _types(file, tokens)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges: list[tuple[float, int, int, int, str, str]] = []
    for number, (token, score, kind) in enumerate(zip(tokens, scores, types, strict=True)):
        if kind == USER_DEFINED and "▁" in token:
            raise ValueError(f"the token '{token}' is found after spaces are replaced, which is not read")
        if kind not in (NORMAL, UNUSED):
            continue
        for place in range(1, len(token)):
            left, right = vocabulary.get(token[:place]), vocabulary.get(token[place:])
            if left is not None and right is not None:
                merges.append((-score, number, left, right, token[:place], token[place:]))
    merges.sort(key=lambda merge: merge[:4])
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=[merge[4:] for merge in merges],
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=BYTE in types,
        )
    )
    begins_with_space = bool(file.metadata.get(f"{KEY}add_space_prefix", True))
    prefix: list[Any] = [normalizers.Prepend("▁")] if begins_with_space else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(
        [*steps, *([decoders.Strip(" ", 1, 0)] if begins_with_space else [])]
    )
    return tokenizer, True


MAKERS: Mapping[str, Any] = {"gpt2": _byte_level, "llama": _sentencepiece}
