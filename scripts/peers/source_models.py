"""The models that every system starts from: random weights in the published shapes, always the same.

    python source_models.py MODEL FOLDER

Speed, size and memory do not depend on what weights say, so seeded ones do where published ones are not at
hand. A converter may insist on a tokenizer: this one has GPT-2's shape and merges that mean nothing.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

MODELS = {
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(n_ctx=1024)),
    # Two blocks of 64: what a process needs before any weight of a size.
    "gpt2-tiny": lambda: GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=2, n_ctx=1024)),
    "bert-6x384": lambda: BertModel(
        BertConfig(
            hidden_size=384,
            num_hidden_layers=6,
            num_attention_heads=12,
            intermediate_size=1536,
        )
    ),
    "bert-base": lambda: BertModel(BertConfig()),
}


def byte_pairs() -> PreTrainedTokenizerFast:
    """256 bytes, the first 50,000 pairs of them, and the end of text: 50,257 tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = list(itertools.islice(itertools.product(alphabet, repeat=2), 50_000))
    end = "<|endoftext|>"
    words = [*alphabet, *(first + second for first, second in merges), end]
    tokenizer = Tokenizer(models.BPE(vocab={word: id for id, word in enumerate(words)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=end, eos_token=end, unk_token=end)


if __name__ == "__main__":
    name, folder = sys.argv[1], Path(sys.argv[2])
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    model.save_pretrained(folder, safe_serialization=True)
    if name.startswith("gpt2"):
        byte_pairs().save_pretrained(folder)
