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
    yield Code(title="onnxruntime", text=ONNXRUNTIME.format(graph=graphs[0]))


def reproducing(document: Json) -> Iterable[Code]:
    """The command, the versions and the recipe that make the artifact again."""
    if "recipe" not in document:
        return
    versions = document["environment"]["versions"].items()
    yield Code(title="Command", text="quantkit quantize --recipe recipe.yaml -o again")
    yield Code(title="Versions", text="\n".join(f"{name}=={version}" for name, version in versions))
    yield Code(title="recipe.yaml", text=document["recipe"].rstrip())
