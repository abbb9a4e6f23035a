"""Code that opens an artifact in each client that runs it, and that makes it again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from quantkit.plan.targets import TARGETS
from quantkit.report.tables import Json

QUANTKIT = """\
import quantkit

model = quantkit.load(".")
print(model.{call})"""
GENERATE, ENCODE = 'generate("The king", max_new_tokens=16)', 'encode(["a text", "another"]).shape'
OPTIMUM = """\
from optimum.onnxruntime import ORTModelForCausalLM
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(".")
model = ORTModelForCausalLM.from_pretrained(".")
ids = tokenizer("The king", return_tensors="pt")
print(tokenizer.decode(model.generate(**ids, max_new_tokens=16)[0]))"""
GENAI = """\
import onnxruntime_genai as genai

model = genai.Model(".")
tokenizer = genai.Tokenizer(model)
parameters = genai.GeneratorParams(model)
parameters.set_search_options(max_length=32)
generator = genai.Generator(model, parameters)
generator.append_tokens(tokenizer.encode("The king"))
while not generator.is_done():
    generator.generate_next_token()
print(tokenizer.decode(generator.get_sequence(0)))"""
ONNXRUNTIME = """\
import onnxruntime

session = onnxruntime.InferenceSession("{graph}")
print([entry.name for entry in session.get_inputs()])"""

DECODER = """\
import numpy as np
import onnxruntime
from tokenizers import Tokenizer

options = onnxruntime.SessionOptions()
options.log_severity_level = 3  # without it a notice says that num_logits may be given
session = onnxruntime.InferenceSession("model.onnx", options)
ids = np.array([Tokenizer.from_file("tokenizer.json").encode("The king is").ids])
feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.arange(ids.size)[None]}
for entry in session.get_inputs():
    if entry.name.startswith("past_key_values"):  # an empty cache
        _, heads, _, size = entry.shape
        kind = np.int8 if "int8" in entry.type else np.float32
        feeds[entry.name] = np.zeros((1, heads, 0, size), kind)
feeds["num_logits"] = np.array([ids.size])  # logits of this many last tokens; left out, of the last one
print(session.run(["logits"], feeds)[0].shape)"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Code:
    title: str
    text: str


def loading(document: Json) -> Iterable[Code]:
    """Code for each client, from the content of report.json."""
    files, kind = document.get("files", {}), document.get("kind")
    graphs = sorted(name for name in files if name.endswith(".onnx"))
    if not kind or not graphs:
        return
    yield Code(title="quantkit", text=QUANTKIT.format(call=ENCODE if "similarity" in document else GENERATE))
    if kind == "decoder" and not TARGETS[document["target"]].is_static:
        yield Code(title="optimum", text=OPTIMUM)
    if "genai_config.json" in files:
        yield Code(title="onnxruntime-genai", text=GENAI)
    is_plain = kind == "decoder" and graphs == ["model.onnx"] and not TARGETS[document["target"]].is_half
    yield Code(title="onnxruntime", text=DECODER if is_plain else ONNXRUNTIME.format(graph=graphs[0]))


def reproducing(document: Json) -> Iterable[Code]:
    """The command, the versions and the recipe that make the artifact again."""
    if "recipe" not in document:
        return
    versions = document["environment"]["versions"].items()
    yield Code(title="Command", text="quantkit quantize --recipe recipe.yaml -o again")
    yield Code(title="Versions", text="\n".join(f"{name}=={version}" for name, version in versions))
    yield Code(title="recipe.yaml", text=document["recipe"].rstrip())
