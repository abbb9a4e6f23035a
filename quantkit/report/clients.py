"""Code that opens an artifact in each client that runs it, and that makes it again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

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

session = onnxruntime.InferenceSession("model.onnx")
ids = np.array([Tokenizer.from_file("tokenizer.json").encode("The king is").ids])
mask = np.full_like(ids, ids.size)  # logits of this many last tokens; a mask of ones: of the last one
feeds = {"input_ids": ids, "attention_mask": mask, "position_ids": np.arange(ids.size)[None]}
for entry in session.get_inputs():
    if entry.name.startswith("past_key_values"):  # an empty cache
        _, heads, _, size = entry.shape
        kind = np.int8 if "int8" in entry.type else np.float32
        feeds[entry.name] = np.zeros((1, heads, 0, size), kind)
print(session.run(["logits"], feeds)[0].shape)"""
PIPELINE = """\
from optimum.onnxruntime import ORTModelFor{name}Classification
from transformers import AutoTokenizer, pipeline

tokenizer = AutoTokenizer.from_pretrained(".")
model = ORTModelFor{name}Classification.from_pretrained(".")
print(pipeline("{task}-classification", model=model, tokenizer=tokenizer)("a text"))"""
CROSS_ENCODER = """\
from sentence_transformers import CrossEncoder

print(CrossEncoder(".", backend="onnx").predict([("a query", "a passage")]))"""
SENTENCES = """\
from sentence_transformers import SentenceTransformer

print(SentenceTransformer(".", backend="onnx").encode(["a text", "another"]).shape)"""
PICTURES = """\
from optimum.onnxruntime import ORTModelForImageClassification
from transformers import AutoImageProcessor, pipeline

processor = AutoImageProcessor.from_pretrained(".")
model = ORTModelForImageClassification.from_pretrained(".")
print(pipeline("image-classification", model=model, image_processor=processor)("picture.png"))"""
# What is labelled, ranked or embedded.
Head = Literal["texts", "tokens", "pairs", "vectors", "pictures", "picture vectors", ""]


@dataclass(frozen=True, kw_only=True, slots=True)
class Code:
    title: str
    text: str


CALLS: Mapping[Head, str] = {
    "texts": 'score(["a text", "another"])',
    "pairs": 'score(["a passage", "another"], query="a query")',
    "pictures": 'score(["picture.png"])',
    "picture vectors": 'encode(["picture.png"]).shape',
}
PEERS: Mapping[Head, Code] = {
    "texts": Code(title="optimum", text=PIPELINE.format(name="Sequence", task="text")),
    "tokens": Code(title="optimum", text=PIPELINE.format(name="Token", task="token")),
    "pairs": Code(title="sentence-transformers", text=CROSS_ENCODER),
    "vectors": Code(title="sentence-transformers", text=SENTENCES),
    "pictures": Code(title="optimum", text=PICTURES),
}


def head_of(document: Json) -> Head:
    """What a compared encoder is for; "" where its report does not say."""
    similarity = document.get("similarity", {})
    labels, ranking = similarity.get("labels"), similarity.get("ranking")
    if similarity.get("of_pictures"):
        return "pictures" if labels else "picture vectors"
    if labels:
        return "tokens" if labels["of_tokens"] else "texts"
    if ranking:
        return "pairs" if ranking["of_pairs"] else "vectors"
    return "vectors" if "nearest_agreement" in similarity else ""


def loading(document: Json) -> Iterable[Code]:
    """Code for each client, from the content of report.json."""
    files, kind = document.get("files", {}), document.get("kind")
    graphs = sorted(name for name in files if name.endswith(".onnx"))
    if not kind or not graphs:
        return
    head = head_of(document)
    call = CALLS.get(head, ENCODE if "similarity" in document else GENERATE)
    yield Code(title="quantkit", text=QUANTKIT.format(call=call))
    if head in PEERS and not TARGETS[document["target"]].is_static:
        yield PEERS[head]
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
