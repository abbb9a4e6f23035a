"""Checks of an installation and a machine; each finding names the command that cures it.

Every check takes its facts as arguments, so that a test can feed it a broken machine. Versions are compared
by release numbers alone: a pre-release or a local build counts as its release.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import Distribution
from typing import Literal

from quantkit.runtime.providers.status import ProviderStatus
from quantkit.runtime.providers.table import PROVIDERS

# Distributions that install a package named `onnxruntime`; two of them overwrite each other's files.
ONNXRUNTIME_WHEELS = frozenset(
    f"onnxruntime{variant}"
    for variant in (
        "", "-azure", "-cann", "-coreml", "-directml", "-gpu", "-gpu-extended", "-lite", "-migraphx",
        "-openvino", "-rocm", "-silicon", "-training", "-training-cpu", "-trt-rtx", "-webgpu", "-windowsml",
    )
)  # fmt: skip

# What to install once they are all gone: plain onnxruntime with a plugin where there is one.
_PLUGIN_INSTEAD = {
    "onnxruntime-openvino": "onnxruntime onnxruntime-ep-openvino",
    "onnxruntime-qnn": "onnxruntime 'onnxruntime-qnn>=2.7'",
    "onnxruntime-trt-rtx": "onnxruntime onnxruntime-ep-nv-tensorrt-rtx",
    "onnxruntime-webgpu": "onnxruntime onnxruntime-ep-webgpu",
}

QUANTKIT = "quantkit-onnx"
# Distributions whose requirements are checked: status of a broken one, and the cure besides installing it.
REQUIREMENT_OWNERS: dict[str, tuple[Literal["warning", "problem"], str]] = {
    QUANTKIT: ("problem", ""),
    "transformers": ("problem", ""),
    "optimum": ("problem", ""),
    "optimum-onnx": (
        "warning",
        "to keep what is installed: pip uninstall -y optimum-onnx (only tracing needs it)",
    ),
    # A plugin is built against one interface of onnxruntime, and says from which version on that exists.
    **{
        package: ("warning", f"to do without it: pip uninstall -y {package}")
        for provider in PROVIDERS.values()
        if provider.source == "plugin"
        for package in (provider.package, *provider.package_variants)
    },
}
PACKAGES = (
    "torch", "transformers", "optimum", "optimum-onnx", "onnx", "onnx-ir", "onnxruntime", "safetensors",
    "tokenizers", "huggingface-hub", "numpy", "pydantic",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One finding; `cure` is the command that mends it, and may be empty where the status is ok."""

    name: str
    status: Literal["ok", "warning", "problem"]
    message: str
    cure: str = ""


def ok(name: str, message: str, cure: str = "") -> Check:
    return Check(name=name, status="ok", message=message, cure=cure)


def warning(name: str, message: str, cure: str) -> Check:
    return Check(name=name, status="warning", message=message, cure=cure)


def problem(name: str, message: str, cure: str) -> Check:
    return Check(name=name, status="problem", message=message, cure=cure)


def normalised(name: str) -> str:
    """A distribution's name as PyPI compares it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed_versions(distributions: Iterable[Distribution]) -> dict[str, str]:
    """Normalised name -> version; of two on the path the first is the one that Python imports."""
    versions: dict[str, str] = {}
    for distribution in distributions:
        name = distribution.metadata["Name"]
        if name:  # an interrupted uninstall leaves folders without metadata
            versions.setdefault(normalised(name), distribution.version)
    return versions


def onnxruntime_wheels(distributions: Iterable[Distribution]) -> dict[str, str]:
    """Name -> version of the distributions that install a package named `onnxruntime`."""
    wheels: dict[str, str] = {}
    for distribution in distributions:
        name = normalised(distribution.metadata["Name"] or "")
        top_level = (distribution.read_text("top_level.txt") or "").split()
        if name in ONNXRUNTIME_WHEELS or "onnxruntime" in top_level:
            wheels.setdefault(name, distribution.version)
    return wheels


def check_onnxruntime_wheels(wheels: Mapping[str, str]) -> Check:
    """Exactly one distribution may bring the `onnxruntime` package."""
    name = "onnxruntime-wheels"
    if not wheels:
        return problem(name, "no onnxruntime is installed", "pip install onnxruntime")
    listed = ", ".join(f"{wheel} {version}" for wheel, version in sorted(wheels.items()))
    if len(wheels) == 1:
        return ok(name, f"one distribution brings onnxruntime: {listed}")
    # The special wheel was installed on purpose, the plain one mostly came as a dependency.
    special = sorted(set(wheels) - {"onnxruntime"})
    keep = _PLUGIN_INSTEAD.get(special[0], special[0]) if len(special) == 1 else "onnxruntime"
    return problem(
        name,
        f"{len(wheels)} distributions write the same folder `onnxruntime` and overwrite each other's files: "
        f"{listed}",
        f"pip uninstall -y {' '.join(sorted(wheels))} && pip install {keep}",
    )


def check_onnxruntime_version(wheels: Mapping[str, str], imported: str | None) -> Check | None:
    """One wheel's metadata beside another's files: the result of an install over an older wheel."""
    if len(wheels) != 1 or imported is None:
        return None  # none or several: check_onnxruntime_wheels reports these
    ((wheel, version),) = wheels.items()
    if base_version(version) == base_version(imported):
        return None
    return problem(
        "onnxruntime-files",
        f"{wheel} {version} is installed, but what Python imports is onnxruntime {imported}: another wheel "
        "has overwritten its files, or another folder on the path comes first",
        f"pip uninstall -y {wheel} && pip install --force-reinstall {wheel}",
    )


def check_requirements(
    owner: str, requirements: Sequence[str], versions: Mapping[str, str]
) -> tuple[Check, ...]:
    """Whether installed packages satisfy the requirements in the metadata of `owner`.

    Checked are the packages that quantkit reports and the providers' packages. Those of an extra are checked
    only for quantkit and only once installed; other environment markers are not evaluated.
    """
    from packaging.requirements import Requirement

    name, (status, way_out) = f"requirements-{owner}", REQUIREMENT_OWNERS[owner]
    reported = {*PACKAGES, *(provider.package for provider in PROVIDERS.values())}
    findings = []
    num_checked = 0
    for requirement in map(Requirement, requirements):
        package, specifier, marker = normalised(requirement.name), requirement.specifier, requirement.marker
        version = versions.get(package)
        is_installed_extra = "extra" in str(marker) and owner == QUANTKIT and version
        if package not in reported or (marker and not is_installed_extra):
            continue
        num_checked += 1
        if version and satisfies(version, str(specifier)):
            continue
        installed = f"{version} is installed" if version else "it is not installed"
        message = f"{owner} needs {package}{specifier}, but {installed}"
        cure = "; ".join(filter(None, (f"pip install '{package}{specifier}'", way_out)))
        findings.append(Check(name=name, status=status, message=message, cure=cure))
    if findings or not num_checked:
        return tuple(findings)
    return (ok(name, f"{num_checked} requirements of {owner} are satisfied"),)


def satisfies(version: str, specifier: str) -> bool:
    # Imported here: the interpreter of another environment that runs a provider's trial may lack packaging.
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(specifier).contains(base_version(version), prereleases=True)


def base_version(version: str) -> str:
    """The release alone; a version that PEP 440 does not know stays as it is."""
    from packaging.version import InvalidVersion, Version

    try:
        return Version(version).base_version
    except InvalidVersion:
        return version


def check_cpu(features: Mapping[str, bool | None]) -> Check:
    """Whether the processor has instructions that make INT8 fast, and exact."""
    name = "cpu-int8"
    fast = [key for key in ("AVX512_VNNI", "AVX_VNNI", "AMX_INT8", "DOTPROD", "I8MM") if features.get(key)]
    if fast:
        return ok(name, f"INT8 dot products in hardware: {', '.join(fast)}")
    measure_first = "measure before you rely on it: quantkit inspect MODEL --spec --device this"
    if features.get("AVX2") is False:
        message = "no AVX2: INT8 runs on 128-bit vectors; expect a smaller file, not speed"
        return warning(name, message, measure_first)
    if features.get("AVX512_VNNI") is False and features.get("AVX_VNNI") is False:
        return warning(
            name,
            "AVX2 without VNNI: an INT8 dot product takes three instructions instead of one, and its 16-bit "
            "sums of pairs (VPMADDUBSW) can saturate, which costs accuracy with 8-bit weights",
            "quantkit quantize MODEL --target cpu-avx2",
        )
    if features.get("DOTPROD") is False:
        message = "no DOTPROD: INT8 is widened to 16 bits; expect a smaller file, not speed"
        return warning(name, message, measure_first)
    return ok(name, "the system does not tell whether VNNI or DOTPROD is there")


def check_cores(logical_cores: int, usable_cores: float) -> Check:
    """More threads than usable cores slow each other down."""
    name = "cpu-cores"
    if usable_cores == logical_cores:
        return ok(name, f"all {logical_cores} logical cores may be used")
    threads = max(1, int(usable_cores))
    return warning(
        name,
        f"this process may use {usable_cores:g} of the {logical_cores} cores that it sees; more threads than "
        "that slow each other down",
        f"export OMP_NUM_THREADS={threads} (torch); onnxruntime: intra_op_num_threads={threads}",
    )


def check_memory(available_bytes: int) -> Check:
    available = f"{available_bytes / 1e9:.1f} GB of memory are available"
    if available_bytes >= 4e9:
        return ok("memory", available)
    return warning(
        "memory",
        f"{available}: 1 billion parameters in FP32 take 4 GB",
        "close other programs, and see what a model takes first: quantkit inspect MODEL --spec",
    )


def check_disk(free_bytes: int, folder: str) -> Check:
    """Room for an export, which holds the model twice while it is written."""
    free = f"{free_bytes / 1e9:.1f} GB are free in {folder}"
    if free_bytes >= 5e9:
        return ok("disk", free)
    return warning(
        "disk",
        f"{free}: an export writes the FP32 and the INT8 model",
        "write elsewhere: quantkit quantize MODEL -o /path/with/room",
    )


# Errors of plugins that need a newer onnxruntime: onnxruntime's own, QNN's, and WebGPU's.
TOO_OLD = ("API version", "requires ORT >=", "minimum required version")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """Facts that decide whether a provider can find a device."""

    cpu_model: str
    has_nvidia_driver: bool
    has_vulkan_loader: bool
    has_gpu_node: bool  # /dev/dri: the way to a GPU for everything but CUDA
    has_npu_node: bool  # /dev/accel


def why_no_device(name: str, hardware: Hardware) -> tuple[str, str] | None:
    """(missing hardware or driver, the cure), or None where the machine gives no reason."""
    if name in ("cuda", "tensorrt", "nv-tensorrt-rtx") and not hardware.has_nvidia_driver:
        return (
            "no NVIDIA driver is loaded",
            "install the driver until nvidia-smi lists a GPU; in a container: docker run --gpus all",
        )
    # The GPU first: onnxruntime lists what the system shows, so that a Vulkan in software brings no device.
    if name == "webgpu" and not (hardware.has_gpu_node or hardware.has_nvidia_driver):
        return "/dev/dri has no GPU", "run where a GPU is; in a container: docker run --device /dev/dri"
    if name == "webgpu" and not hardware.has_vulkan_loader:
        return (
            "the Vulkan loader, libvulkan.so.1, is missing",
            "apt-get install libvulkan1 mesa-vulkan-drivers",
        )
    is_intel = "intel" in hardware.cpu_model.lower()
    if name == "openvino" and not (is_intel or hardware.has_gpu_node or hardware.has_npu_node):
        return (
            f"the plugin lists Intel's devices alone, and this CPU is {hardware.cpu_model or 'unknown'}",
            "an older wheel takes any x86 CPU, in an environment of its own: python -m venv ov && ov/bin/pip "
            "install onnxruntime-openvino psutil && quantkit bench DIR --provider openvino@ov/bin/python",
        )
    return None


def check_provider(status: ProviderStatus, hardware: Hardware | None = None) -> Check | None:
    """An installed provider should work; only the CPU's must be installed."""
    name = f"provider-{status.name}"
    if status.usable:
        return ok(name, f"{status.name} works: {', '.join(status.devices) or 'device not named'}")
    provider = PROVIDERS[status.name]
    if status.name == "cpu":
        return problem(name, status.why_not, "pip install --force-reinstall onnxruntime")
    if not status.installed:
        return None
    # Installing again helps where a library is missing; where there is no device, removing ends the warning.
    remove = f"pip uninstall -y {' '.join((provider.package, *provider.package_variants))}"
    if provider.source == "built-in":
        remove = f"{remove} && pip install --force-reinstall onnxruntime"
    missing = why_no_device(status.name, hardware) if hardware else None
    message, cure = status.why_not, f"with hardware and driver in place: {provider.install}"
    if any(words in status.why_not for words in TOO_OLD):
        cure = f"pip install --upgrade onnxruntime {provider.package}"
    elif missing:
        message, cure = f"{message}; {missing[0]}", missing[1]
    return warning(name, message, f"{cure}; else: {remove}")


def check_hub(environment: Mapping[str, str]) -> Check:
    """Whether Hub names are looked up online; offline is a choice, not a fault."""
    offline = [
        key
        for key in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
        if environment.get(key, "").upper() in ("1", "ON", "YES", "TRUE")
    ]
    if not offline:
        return ok("hub", "Hub names are looked up online (HF_HUB_OFFLINE is not set)")
    return ok(
        "hub",
        f"offline by {' and '.join(offline)}: local folders, `demo` and models in the cache work",
        f"to go online: unset {' '.join(offline)}",
    )
