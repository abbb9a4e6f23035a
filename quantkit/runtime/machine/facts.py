"""Facts of this machine and this installation, for `quantkit doctor`.

`checks.py` judges the facts. Versions come from the metadata of the distributions, so that torch and
transformers stay unloaded and a broken one can still be reported. CPU features are read from the operating
system, or from numpy where the system does not list them (Windows); a feature that neither lists is None.
"""

from __future__ import annotations

import ctypes.util
import dataclasses
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

import quantkit
from quantkit.runtime.machine.checks import (
    PACKAGES,
    QUANTKIT,
    REQUIREMENT_OWNERS,
    Check,
    Hardware,
    check_cores,
    check_cpu,
    check_disk,
    check_hub,
    check_memory,
    check_onnxruntime_version,
    check_onnxruntime_wheels,
    check_provider,
    check_requirements,
    installed_versions,
    onnxruntime_wheels,
)
from quantkit.runtime.providers.status import ProviderStatus, available_providers

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")  # of Linux: a folder for each cache of a core
CGROUP = Path("/sys/fs/cgroup")  # version 2, as a container sees its own limits
# Other ways to run an exported or comparable model; reported, never needed.
OTHER_RUNTIMES = ("onnxruntime-genai", "openvino", "ctranslate2", "llama-cpp-python", "executorch")
# Settings that change what is loaded, from where, and how fast; tokens and proxies are never read.
ENVIRONMENT = (
    "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HOME", "QUANTKIT_CACHE", "XDG_CACHE_HOME",
    "OMP_NUM_THREADS",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FeatureNames:
    """Names of one CPU feature by source; some of numpy's groups prove presence, some prove absence."""

    linux: str  # a flag of /proc/cpuinfo
    macos: str  # a token or a key of sysctl
    numpy_present: tuple[str, ...] = ()
    numpy_absent: tuple[str, ...] = ()


# numpy's groups: https://numpy.org/doc/stable/reference/simd/build-options.html (X86_V3 holds AVX2, FMA3 and
# F16C; X86_V4 the AVX512 of Skylake; AVX512_CLX and _ICL hold VNNI; SPR holds BF16).
FEATURES: dict[str, dict[str, FeatureNames]] = {
    "x86": {
        "AVX2": FeatureNames(
            linux="avx2", macos="AVX2", numpy_present=("AVX2", "X86_V3"), numpy_absent=("AVX2", "X86_V3")
        ),
        "FMA": FeatureNames(
            linux="fma", macos="FMA", numpy_present=("FMA3", "X86_V3"), numpy_absent=("FMA3",)
        ),
        "F16C": FeatureNames(
            linux="f16c", macos="F16C", numpy_present=("F16C", "X86_V3"), numpy_absent=("F16C",)
        ),
        "AVX512F": FeatureNames(
            linux="avx512f",
            macos="AVX512F",
            numpy_present=("AVX512F", "AVX512_SKX", "X86_V4"),
            numpy_absent=("AVX512F",),
        ),
        "AVX512_VNNI": FeatureNames(
            linux="avx512_vnni",
            macos="AVX512VNNI",
            numpy_present=("AVX512_CLX", "AVX512_ICL"),
            # without the AVX512 of Skylake there is none of its extensions either
            numpy_absent=("AVX512_CLX", "AVX512F", "AVX512_SKX", "X86_V4"),
        ),
        "AVX_VNNI": FeatureNames(linux="avx_vnni", macos="AVXVNNI"),
        "AVX512_BF16": FeatureNames(
            linux="avx512_bf16",
            macos="AVX512BF16",
            numpy_present=("AVX512_SPR",),
            numpy_absent=("AVX512F", "AVX512_SKX", "X86_V4"),
        ),
        "AMX_INT8": FeatureNames(linux="amx_int8", macos="AMXINT8"),
        "AMX_BF16": FeatureNames(linux="amx_bf16", macos="AMXBF16"),
    },
    "arm": {
        "NEON": FeatureNames(linux="asimd", macos="hw.optional.AdvSIMD", numpy_present=("NEON", "ASIMD")),
        "DOTPROD": FeatureNames(
            linux="asimddp",
            macos="hw.optional.arm.FEAT_DotProd",
            numpy_present=("ASIMDDP",),
            numpy_absent=("ASIMDDP",),
        ),
        "I8MM": FeatureNames(linux="i8mm", macos="hw.optional.arm.FEAT_I8MM"),
        "SVE": FeatureNames(
            linux="sve", macos="hw.optional.arm.FEAT_SVE", numpy_present=("SVE",), numpy_absent=("SVE",)
        ),
        "BF16": FeatureNames(linux="bf16", macos="hw.optional.arm.FEAT_BF16"),
    },
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cpu:
    model: str
    architecture: str  # as the system names it: x86_64, AMD64, aarch64, arm64
    physical_cores: int
    logical_cores: int
    usable_cores: float  # after affinity and a container's quota
    features: dict[str, bool | None]  # None: the system does not tell
    features_from: str

    @property
    def num_threads(self) -> int:
        """Threads that do useful work: one for each usable physical core."""
        return max(1, min(self.physical_cores, int(self.usable_cores)))

    @property
    def saturates(self) -> bool:
        """Whether products of 8-bit operands may cut off sums: x86 without VNNI, or not known."""
        return "AVX2" in self.features and not any(
            self.features.get(name) for name in ("AVX512_VNNI", "AVX_VNNI")
        )

    def threads_for(self, threads: int | None) -> int:
        """The threads that are asked for, up to a few a core; thousands take minutes to start."""
        return min(threads or self.num_threads, max(16, 4 * self.logical_cores))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Main memory; the limit of a container where it is smaller."""

    total_bytes: int
    available_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    quantkit_version: str
    python_version: str
    python_executable: str
    platform: str
    packages: dict[str, str | None]  # None: not installed
    runtimes: dict[str, str]
    environment: dict[str, str]
    cpu: Cpu
    memory: Memory
    folder: str
    free_disk_bytes: int
    providers: tuple[ProviderStatus, ...]
    checks: tuple[Check, ...]

    @property
    def has_problem(self) -> bool:
        return any(check.status == "problem" for check in self.checks)


def diagnose() -> Diagnosis:
    """Gather the facts and judge them, in well under a second and without torch and transformers."""
    distributions = list(importlib.metadata.distributions())
    wheels = onnxruntime_wheels(distributions)
    versions = installed_versions(distributions)
    if wheels:  # whichever wheel brings the package satisfies a requirement on it
        versions.setdefault("onnxruntime", next(iter(wheels.values())))
    cpu = read_cpu()
    memory = read_memory()
    folder = str(Path.cwd())
    free_disk_bytes = shutil.disk_usage(folder).free
    providers = available_providers()
    hardware = read_hardware(cpu.model)
    requirements = [
        check
        for owner in REQUIREMENT_OWNERS
        if owner in versions
        for check in check_requirements(owner, importlib.metadata.requires(owner) or (), versions)
    ]
    if QUANTKIT not in versions:
        note = f"{QUANTKIT} runs from its source and is not installed, so its requirements were not checked"
        requirements.append(
            Check(name=f"requirements-{QUANTKIT}", status="warning", message=note, cure="pip install -e .")
        )
    checks = (
        check_onnxruntime_wheels(wheels),
        *filter(None, [check_onnxruntime_version(wheels, imported_onnxruntime())]),
        *requirements,
        *filter(None, (check_provider(status, hardware) for status in providers)),
        check_cpu(cpu.features),
        check_cores(cpu.logical_cores, cpu.usable_cores),
        check_memory(memory.available_bytes),
        check_disk(free_disk_bytes, folder),
        check_hub(os.environ),
    )
    return Diagnosis(
        quantkit_version=quantkit.__version__,
        python_version=platform.python_version(),
        python_executable=sys.executable,
        platform=platform.platform(),
        packages={name: versions.get(name) for name in PACKAGES},
        runtimes=wheels | {name: versions[name] for name in OTHER_RUNTIMES if name in versions},
        environment={key: os.environ[key] for key in ENVIRONMENT if key in os.environ},
        cpu=cpu,
        memory=memory,
        folder=folder,
        free_disk_bytes=free_disk_bytes,
        providers=providers,
        checks=checks,
    )


def imported_onnxruntime() -> str | None:
    """The version in the package's files, whatever the metadata of the wheel says."""
    try:
        import onnxruntime
    except Exception:  # damaged: the CPU provider's check tells
        return None
    return getattr(onnxruntime, "__version__", None)


def read_hardware(cpu_model: str, root: Path = Path("/")) -> Hardware:
    """GPUs and NPUs that the system shows without a vendor's library."""
    has_nvidia = (root / "proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None
    return Hardware(
        cpu_model=cpu_model,
        has_nvidia_driver=has_nvidia,
        # Windows and macOS bring Direct3D and Metal instead.
        has_vulkan_loader=sys.platform != "linux" or ctypes.util.find_library("vulkan") is not None,
        has_gpu_node=sys.platform != "linux" or any(root.glob("dev/dri/renderD*")),
        has_npu_node=sys.platform != "linux" or any(root.glob("dev/accel/accel*")),
    )


def cache_bytes(folder: Path = CACHES) -> int | None:
    """Size of the largest cache of the first core; None where the system does not tell."""
    sizes = []
    for path in folder.glob("index*/size"):
        try:
            text = path.read_text(encoding="ascii").strip()
            sizes.append(int(text[:-1]) << {"K": 10, "M": 20}[text[-1]])
        except (OSError, ValueError, KeyError, IndexError):
            continue
    return max(sizes, default=None)


def read_cpu() -> Cpu:
    model = ""
    features: dict[str, bool | None] = {}
    source = "numpy"
    machine = platform.machine()
    if sys.platform == "linux":
        cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        model, features = model_of_cpuinfo(cpuinfo), features_of_cpuinfo(cpuinfo, machine)
        source = "/proc/cpuinfo"
    elif sys.platform == "darwin":
        text = _sysctl()
        model, features = model_of_sysctl(text), features_of_sysctl(text, machine)
        source = "sysctl"
    if not any(features.values()):
        # Windows, or a sandbox without /proc or sysctl
        import numpy as np

        features, source = features_of_numpy(np.show_config(mode="dicts"), machine), "numpy"
    logical_cores = psutil.cpu_count(logical=True) or os.cpu_count() or 1
    return Cpu(
        model=model or platform.processor() or machine,
        architecture=machine,
        physical_cores=psutil.cpu_count(logical=False) or logical_cores,
        logical_cores=logical_cores,
        usable_cores=usable_cores(logical_cores),
        features=features,
        features_from=source,
    )


def usable_cores(logical_cores: int, cgroup: Path = CGROUP) -> float:
    """Cores that affinity and a container's CPU quota leave to this process."""
    cores = float(logical_cores)
    if sys.platform == "linux":
        cores = min(cores, len(os.sched_getaffinity(0)))
    quota, _, period = _first_line(cgroup / "cpu.max").partition(" ")
    return min(cores, int(quota) / int(period)) if quota.isdigit() and period.isdigit() else cores


def read_memory(cgroup: Path = CGROUP) -> Memory:
    """Memory of the machine, or of the container where that is less."""
    memory = psutil.virtual_memory()
    total, available = memory.total, memory.available
    limit, used = _first_line(cgroup / "memory.max"), _first_line(cgroup / "memory.current")
    if limit.isdigit() and used.isdigit():
        total, available = min(total, int(limit)), min(available, max(0, int(limit) - int(used)))
    return Memory(total_bytes=total, available_bytes=available)


def model_of_cpuinfo(text: str) -> str:
    """The processor's name; on Arm its numbers."""
    fields: dict[str, str] = dict(re.findall(r"^([^:\n]+?)\s*:\s*(.+)$", text, flags=re.MULTILINE))
    if "model name" in fields:
        return fields["model name"]
    numbers = [f"{key[4:]} {fields[key]}" for key in ("CPU implementer", "CPU part") if key in fields]
    return fields.get("Model") or fields.get("Hardware") or " ".join(numbers)


def features_of_cpuinfo(text: str, machine: str) -> dict[str, bool | None]:
    """Features by the flags of the first core."""
    match = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, flags=re.MULTILINE)
    flags = set(match.group(1).split()) if match else None
    return {
        feature: None if flags is None else names.linux in flags
        for feature, names in _features(machine).items()
    }


def model_of_sysctl(text: str) -> str:
    match = re.search(r"^machdep\.cpu\.brand_string:\s*(.+)$", text, flags=re.MULTILINE)
    return match.group(1) if match else ""


def features_of_sysctl(text: str, machine: str) -> dict[str, bool | None]:
    """Features by the lists of an Intel Mac or the `FEAT_` keys of an Apple one."""
    values = dict(re.findall(r"^([\w.]+):\s*(.*)$", text, flags=re.MULTILINE))
    lists = (values.get("machdep.cpu.features", ""), values.get("machdep.cpu.leaf7_features", ""))
    tokens = {token for words in lists for token in words.split()}
    return {
        feature: names.macos in tokens or values.get(names.macos) == "1" if values else None
        for feature, names in _features(machine).items()
    }


def features_of_numpy(config: Any, machine: str) -> dict[str, bool | None]:
    """Features by numpy's start-up detection (`np.show_config(mode="dicts")`), which is incomplete."""
    simd = config.get("SIMD Extensions", {})
    present = {*simd.get("baseline", ()), *simd.get("found", ())}
    absent = set(simd.get("not found", ()))
    return {
        feature: True
        if present.intersection(names.numpy_present)
        else False
        if absent.intersection(names.numpy_absent)
        else None
        for feature, names in _features(machine).items()
    }


def _features(machine: str) -> dict[str, FeatureNames]:
    is_arm = machine.lower().startswith(("arm", "aarch"))
    return FEATURES["arm" if is_arm else "x86"]


def _sysctl() -> str:
    command = ["/usr/sbin/sysctl", "machdep.cpu", "hw.optional"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _first_line(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
