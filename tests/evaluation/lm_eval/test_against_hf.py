"""Under lm-evaluation-harness, a float export gives what the harness's own `hf` model gives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import resources
from importlib.util import find_spec
from pathlib import Path

import pytest
from exporting import NOTHING, build_tiny, export
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from quantkit.errors import InputError
from quantkit.model.families import FAMILIES
from quantkit.runtime.generate import Sampling

ABSENT = "lm_eval is not installed: pip install 'quantkit-onnx[lm-eval]'"
lm_eval = pytest.importorskip("lm_eval", reason=ABSENT)
lm_eval_tasks = pytest.importorskip("lm_eval.tasks", reason=ABSENT)
adapter = pytest.importorskip("quantkit.evaluation.lm_eval.adapter", reason=ABSENT)  # registers the model
NEEDS_HF = pytest.mark.skipif(
    not (find_spec("accelerate") and find_spec("peft")),
    reason="the harness's hf model needs accelerate and peft: pip install 'lm_eval[hf]'",
)
DEMO = Path(str(resources.files("quantkit") / "assets" / "demo"))
KINDS = {
    "choice": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
doc_to_choice: "{{choices}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
""",
    "rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}]
""",
    "answers": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n", "."], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder with three tasks on the held-out text: questions short and far too long, and whole texts."""
    folder = tmp_path_factory.mktemp("tasks")
    words = (DEMO / "evaluation.txt").read_text(encoding="utf-8").split()
    rows = []
    for number in range(6):
        start, end = number * 60, number * 60 + 8 + 9 * number
        choices = [" ".join(words[end : end + count]) for count in (1, 4)] + [words[4000 + number]]
        rows.append({"question": " ".join(words[start:end]), "choices": choices, "answer": number % 3})
    rows.append({"question": " ".join(words[:700]), "choices": ["king", "queen of all"], "answer": 0})
    for row, count in zip(rows, (500, 3, 40, 7, 60, 2, 1), strict=True):
        row["text"] = " ".join(words[5000 : 5000 + count])
    data = folder / "rows.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in rows))
    for kind, text in KINDS.items():
        head = f"task: local_{kind}\ndataset_path: json\ntest_split: test\n"
        source = f"dataset_kwargs: {{data_files: {{test: {json.dumps(str(data))}}}}}\n"
        (folder / f"{kind}.yaml").write_text(head + source + text)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Checkpoint and float export of the embedded model, and of a Llama whose tokenizer begins every text."""
    folder = tmp_path_factory.mktemp("models")
    export(DEMO, folder / "demo", min_dim=NOTHING)
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    sizes = {**FAMILIES["llama"].tiny, "vocab_size": 4096, "max_position_embeddings": 64}
    build_tiny("LlamaForCausalLM", sizes, spread=0.3).save_pretrained(folder / "source")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|endoftext|>", eos_token="<|endoftext|>"
    ).save_pretrained(folder / "source")
    export(folder / "source", folder / "llama", min_dim=NOTHING)
    return {"demo": (DEMO, folder / "demo"), "llama": (folder / "source", folder / "llama")}


def evaluated(model, arguments, tasks, **options):
    """Every answer of every task, by task and document."""
    results = lm_eval.simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=[f"local_{kind}" for kind in KINDS],
        task_manager=lm_eval_tasks.TaskManager(include_path=str(tasks), include_defaults=False),
        device="cpu",
        bootstrap_iters=0,
        log_samples=True,
        **options,
    )
    return {
        (task, sample["doc_id"]): [response[0] for response in sample["resps"]]
        for task, samples in results["samples"].items()
        for sample in samples
    }


@NEEDS_HF
@pytest.mark.parametrize("name", ["demo", "llama"])
def test_the_float_export_scores_like_the_original_under_hf(models, tasks, name):
    source, exported = models[name]
    wanted = evaluated("hf", f"pretrained={source},dtype=float32", tasks, batch_size=1)
    found = evaluated("quantkit", f"path={exported},threads=1", tasks, batch_size=3)
    assert found.keys() == wanted.keys()
    assert len(wanted) == 21
    for key, answers in wanted.items():
        for answer, other in zip(answers, found[key], strict=True):
            if isinstance(answer, str):
                assert other == answer
            else:
                value, verdict = answer if isinstance(answer, tuple) else (answer, None)
                made, own_verdict = other if isinstance(other, tuple) else (other, None)
                assert made == pytest.approx(value, rel=1e-4, abs=1e-3)
                assert own_verdict == verdict


def test_the_command_finds_the_model(models, tasks, tmp_path):
    command = [sys.executable, "-m", "quantkit.cli", "lm-eval", "--model", "quantkit", "--model_args"]
    command += [
        f"path={models['demo'][1]},threads=1",
        "--tasks",
        "local_rolling",
        "--include_path",
        str(tasks),
    ]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert "|local_rolling|" in ran.stdout
    assert "word_perplexity" in ran.stdout


def test_wrong_arguments_are_named(models):
    path = str(models["demo"][1])
    for arguments, words in (
        ({"path": path, "revision": "x"}, "unknown: revision"),
        ({}, "path=DIR is required"),
        ({"path": "no/such"}, "no such file"),
        ({"path": path, "batch_size": "many"}, "whole number"),
        ({"path": path, "max_length": 513}, "context of 512"),
    ):
        with pytest.raises(InputError, match=words):
            adapter.QuantkitLM(**arguments)
    with pytest.raises(InputError, match="cannot follow num_beams=4"):
        adapter.read_settings({"until": "x", "num_beams": 4}, 8)


def test_settings_of_a_generation():
    assert adapter.read_settings({}, 8) == (8, Sampling(), [])
    settings = {"until": ["a", ""], "max_new_tokens": 3, "temperature": 0.0, "num_beams": 1, "top_p": 0.9}
    assert adapter.read_settings(settings, 8) == (3, Sampling(), ["a"])
    _, sampling, _ = adapter.read_settings(
        {"do_sample": True, "temperature": 0.7, "top_k": 5, "until": "a"}, 8
    )
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.7, 5, 1.0)
