"""The doctor: broken installations and poor machines are fed to it as facts, and it names fault and cure."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit.runtime.machine import checks
from quantkit.runtime.machine import facts as doctor
from quantkit.runtime.machine.checks import Check
from quantkit.runtime.providers.status import ProviderStatus
from quantkit.runtime.providers.table import PROVIDERS

CASCADE_LAKE = """processor\t: 0
model name\t: Intel(R) Xeon(R) Gold 6248 CPU @ 2.50GHz
flags\t\t: fpu sse2 avx f16c fma avx2 avx512f avx512dq avx512bw avx512vl avx512_vnni

processor\t: 1
model name\t: Intel(R) Xeon(R) Gold 6248 CPU @ 2.50GHz
flags\t\t: fpu sse2 avx f16c fma avx2 avx512f avx512dq avx512bw avx512vl avx512_vnni
"""
HASWELL = "model name\t: Intel(R) Core(TM) i5-4570\nflags\t\t: fpu sse2 avx f16c fma avx2\n"
GRAVITON_3 = """processor\t: 0
BogoMIPS\t: 2100.00
Features\t: fp asimd evtstrm aes crc32 atomics fphp asimdhp asimddp sve asimdfhm i8mm bf16
CPU implementer\t: 0x41
CPU part\t: 0xd40
"""
APPLE_M2 = """machdep.cpu.brand_string: Apple M2
hw.optional.AdvSIMD: 1
hw.optional.arm.FEAT_DotProd: 1
hw.optional.arm.FEAT_I8MM: 1
hw.optional.arm.FEAT_BF16: 1
"""
INTEL_MAC = """machdep.cpu.brand_string: Intel(R) Core(TM) i7-8750H CPU @ 2.20GHz
machdep.cpu.features: FPU SSE2 FMA F16C AVX1.0
machdep.cpu.leaf7_features: BMI1 AVX2 BMI2
"""


def add_distribution(
    folder: Path, name: str, version: str, *, top_level: str = "", requires: str = ""
) -> None:
    metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}")
    if top_level:
        (metadata / "top_level.txt").write_text(f"{top_level}\n")


def found_in(folder: Path) -> list[Distribution]:
    return list(distributions(path=[str(folder)]))


def wheel_check(folder: Path) -> Check:
    return checks.check_onnxruntime_wheels(checks.onnxruntime_wheels(found_in(folder)))


def test_two_onnxruntime_wheels_are_named_with_the_cure(tmp_path: Path) -> None:
    add_distribution(tmp_path, "onnxruntime", "1.31.1", top_level="onnxruntime")
    add_distribution(tmp_path, "onnxruntime-gpu", "1.31.0", top_level="onnxruntime")
    add_distribution(tmp_path, "onnxruntime-ep-openvino", "1.8.1", top_level="onnxruntime_ep_openvino")
    add_distribution(tmp_path, "onnxruntime-qnn", "2.7.0", top_level="onnxruntime_qnn")
    check = wheel_check(tmp_path)
    assert check.status == "problem"
    assert "onnxruntime 1.31.1, onnxruntime-gpu 1.31.0" in check.message
    assert check.cure == ("pip uninstall -y onnxruntime onnxruntime-gpu && pip install onnxruntime-gpu")


def test_wheel_without_top_level_file_is_known_by_name_and_cured_by_its_plugin(tmp_path: Path) -> None:
    add_distribution(tmp_path, "onnxruntime", "1.31.1")
    add_distribution(tmp_path, "onnxruntime-openvino", "1.24.1")
    assert wheel_check(tmp_path).cure == (
        "pip uninstall -y onnxruntime onnxruntime-openvino && pip install onnxruntime onnxruntime-ep-openvino"
    )


def test_unknown_name_is_caught_by_the_package_it_brings(tmp_path: Path) -> None:
    add_distribution(tmp_path, "onnxruntime", "1.31.1", top_level="onnxruntime")
    add_distribution(tmp_path, "acme_inference", "3.0", top_level="onnxruntime")
    assert "acme-inference 3.0" in wheel_check(tmp_path).message


def test_one_wheel_is_fine_and_none_is_not(tmp_path: Path) -> None:
    assert wheel_check(tmp_path).cure == "pip install onnxruntime"
    add_distribution(tmp_path, "onnxruntime-gpu", "1.31.1", top_level="onnxruntime")
    assert wheel_check(tmp_path).status == "ok"


def test_first_on_the_path_wins_and_wreckage_is_passed_over(tmp_path: Path) -> None:
    add_distribution(tmp_path / "first", "Tokenizers", "0.23.0")
    add_distribution(tmp_path / "second", "tokenizers", "0.22.0")
    (tmp_path / "second" / "left_over-1.0.dist-info").mkdir()
    assert checks.installed_versions(
        distributions(path=[str(tmp_path / "first"), str(tmp_path / "second")])
    ) == {"tokenizers": "0.23.0"}


def test_optimum_onnx_beside_transformers_5_is_a_warning_with_both_ways_out(tmp_path: Path) -> None:
    requires = "Requires-Dist: optimum~=2.1.0\nRequires-Dist: transformers<4.58.0,>=4.36\n"
    add_distribution(tmp_path, "optimum-onnx", "0.1.0", requires=requires)
    (distribution,) = found_in(tmp_path)
    versions = {"transformers": "5.23.0", "optimum": "2.1.0", "optimum-onnx": "0.1.0"}
    (check,) = checks.check_requirements("optimum-onnx", distribution.requires or [], versions)
    assert check.status == "warning"
    assert "5.23.0" in check.message and "transformers<4.58.0,>=4.36" in check.message
    assert "pip install 'transformers<4.58.0,>=4.36'" in check.cure
    assert "pip uninstall -y optimum-onnx" in check.cure
    (check,) = checks.check_requirements(
        "optimum-onnx", distribution.requires or [], versions | {"transformers": "4.57.6"}
    )
    assert check.status == "ok"


def test_floors_of_quantkit_are_read_from_its_metadata() -> None:
    requirements = [
        "torch>=2.6",
        "onnx-ir>=0.1.12",
        "unrelated>=99",
        "onnxruntime-qnn>=2.7; (platform_machine == 'x86_64') and extra == 'qnn'",
        "optimum-onnx>=0.1; extra == 'trace'",
    ]
    versions = {"torch": "2.5.1+cu121", "onnxruntime-qnn": "1.20.0"}
    found = checks.check_requirements("quantkit-onnx", requirements, versions)
    assert [(check.status, check.cure) for check in found] == [
        ("problem", "pip install 'torch>=2.6'"),
        ("problem", "pip install 'onnx-ir>=0.1.12'"),  # not installed at all
        ("problem", "pip install 'onnxruntime-qnn>=2.7'"),  # of an extra, yet installed and too old
    ]
    versions = {"torch": "2.13.0+cpu", "onnx_ir": "1.0", "onnx-ir": "1.1.0"}
    (check,) = checks.check_requirements("quantkit-onnx", requirements, versions)
    assert check.status == "ok" and check.message.startswith("2 requirements")


@pytest.mark.parametrize(
    ("features", "status", "words"),
    [
        ({"AVX2": True, "AVX512_VNNI": True, "AVX_VNNI": False}, "ok", "AVX512_VNNI"),
        ({"AVX2": True, "AVX512_VNNI": False, "AVX_VNNI": True}, "ok", "AVX_VNNI"),
        ({"AVX2": True, "AVX512_VNNI": False, "AVX_VNNI": False}, "warning", "saturate"),
        ({"AVX2": True, "AVX512_VNNI": None, "AVX_VNNI": None}, "ok", "does not tell"),
        ({"AVX2": False, "AVX512_VNNI": False, "AVX_VNNI": False}, "warning", "no AVX2"),
        ({"NEON": True, "DOTPROD": True}, "ok", "DOTPROD"),
        ({"NEON": True, "DOTPROD": False}, "warning", "no DOTPROD"),
    ],
)
def test_cpu_check(features: Mapping[str, bool | None], status: str, words: str) -> None:
    check = checks.check_cpu(features)
    assert check.status == status and words in check.message
    assert bool(check.cure) == (status != "ok")


def test_avx2_without_vnni_is_sent_to_its_target() -> None:
    check = checks.check_cpu({"AVX2": True, "AVX512_VNNI": False, "AVX_VNNI": False})
    assert check.cure == "quantkit quantize MODEL --target cpu-avx2"


def test_memory_disk_and_cores_warn_below_their_bounds() -> None:
    assert checks.check_memory(int(3.9e9)).status == "warning"
    assert checks.check_memory(int(4.1e9)).status == "ok"
    assert checks.check_disk(int(4.9e9), "/here").status == "warning"
    assert checks.check_disk(int(5.1e9), "/here").status == "ok"
    assert checks.check_cores(8, 8.0).status == "ok"
    check = checks.check_cores(64, 2.5)
    assert check.status == "warning" and "OMP_NUM_THREADS=2" in check.cure


def test_providers_are_judged_by_what_is_installed() -> None:
    dead_cpu = ProviderStatus(name="cpu", usable=False, installed=False, why_not="broken")
    idle = ProviderStatus(name="qnn", usable=False, installed=True, version="2.7.0", why_not="no device")
    absent = ProviderStatus(name="qnn", usable=False, installed=False, why_not="not installed")
    works = ProviderStatus(name="qnn", usable=True, installed=True, devices=("NPU (Qualcomm)",))
    found = [checks.check_provider(status) for status in (dead_cpu, idle, absent, works)]
    assert [check and check.status for check in found] == ["problem", "warning", None, "ok"]
    assert found[1] is not None and "no device" in found[1].message
    assert PROVIDERS["qnn"].install in found[1].cure and "pip uninstall -y onnxruntime-qnn" in found[1].cure


@pytest.mark.parametrize(("value", "is_offline"), [("1", True), ("true", True), ("0", False), ("", False)])
def test_offline_is_reported_as_information(value: str, is_offline: bool) -> None:
    check = checks.check_hub({"HF_HUB_OFFLINE": value})
    assert check.status == "ok"
    assert check.cure == ("to go online: unset HF_HUB_OFFLINE" if is_offline else "")


def test_cpuinfo_of_x86_and_arm() -> None:
    assert doctor.model_of_cpuinfo(CASCADE_LAKE) == "Intel(R) Xeon(R) Gold 6248 CPU @ 2.50GHz"
    features = doctor.features_of_cpuinfo(CASCADE_LAKE, "x86_64")
    assert {name for name, present in features.items() if present} == {
        "AVX2", "FMA", "F16C", "AVX512F", "AVX512_VNNI",
    }  # fmt: skip
    assert doctor.features_of_cpuinfo(HASWELL, "AMD64")["AVX512_VNNI"] is False
    assert doctor.model_of_cpuinfo(GRAVITON_3) == "implementer 0x41 part 0xd40"
    assert set(doctor.features_of_cpuinfo(GRAVITON_3, "aarch64").values()) == {True}
    assert set(doctor.features_of_cpuinfo("", "x86_64").values()) == {None}


def test_sysctl_of_apple_and_intel_macs() -> None:
    assert doctor.model_of_sysctl(APPLE_M2) == "Apple M2"
    features = doctor.features_of_sysctl(APPLE_M2, "arm64")
    assert features == {"NEON": True, "DOTPROD": True, "I8MM": True, "SVE": False, "BF16": True}
    features = doctor.features_of_sysctl(INTEL_MAC, "x86_64")
    assert [features[name] for name in ("AVX2", "FMA", "F16C", "AVX512F")] == [True, True, True, False]


def test_numpy_says_none_where_it_cannot_know() -> None:
    cascade_lake = {"SIMD Extensions": {"found": ["X86_V3", "X86_V4"], "not found": ["AVX512_ICL"]}}
    features = doctor.features_of_numpy(cascade_lake, "AMD64")
    assert features["AVX2"] is True and features["AVX512F"] is True
    assert features["AVX512_VNNI"] is None  # Cascade Lake has it, an earlier Skylake has not
    haswell = {"SIMD Extensions": {"found": ["X86_V3"], "not found": ["X86_V4", "AVX512_ICL"]}}
    assert doctor.features_of_numpy(haswell, "AMD64")["AVX512_VNNI"] is False
    assert set(doctor.features_of_numpy({}, "AMD64").values()) == {None}


def test_system_and_numpy_agree_on_this_machine() -> None:
    cpu = doctor.read_cpu()
    for name, present in doctor.features_of_numpy(np.show_config(mode="dicts"), cpu.architecture).items():
        assert present is None or present == cpu.features[name], name


def test_a_container_quota_limits_cores_and_memory(tmp_path: Path) -> None:
    free = doctor.usable_cores(64, tmp_path)  # no cgroup files at all
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert doctor.usable_cores(64, tmp_path) == free
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert doctor.usable_cores(64, tmp_path) == 0.5
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert doctor.read_memory(tmp_path) == doctor.Memory(total_bytes=1_000_000, available_bytes=600_000)


def test_diagnosis_of_this_machine_is_json_and_loads_no_model_library() -> None:
    code = (
        "import json, sys\n"
        "from quantkit.model.model_map import to_json\n"
        "from quantkit.runtime.machine.facts import diagnose\n"
        "print(json.dumps(to_json(diagnose())))\n"
        "assert not {'torch', 'transformers', 'onnx'} & set(sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    diagnosis = json.loads(result.stdout)  # nothing else was printed
    assert diagnosis["packages"]["numpy"] == np.__version__
    assert diagnosis["python_executable"] == sys.executable
    assert diagnosis["cpu"]["logical_cores"] >= diagnosis["cpu"]["physical_cores"] >= 1
    assert diagnosis["memory"]["total_bytes"] >= diagnosis["memory"]["available_bytes"] > 0
    assert diagnosis["free_disk_bytes"] > 0 and math.isfinite(diagnosis["cpu"]["usable_cores"])
    assert [row["name"] for row in diagnosis["providers"]] == list(PROVIDERS)
    assert {check["status"] for check in diagnosis["checks"]} <= {"ok", "warning", "problem"}
    for check in diagnosis["checks"]:
        assert check["message"] and "\n" not in check["message"] + check["cure"]
        assert check["cure"] or check["status"] == "ok"


QUIET = checks.Hardware(
    cpu_model="AMD EPYC",
    has_nvidia_driver=False,
    has_vulkan_loader=True,
    has_gpu_node=False,
    has_npu_node=False,
)


def idle(name: str, why_not: str = "it finds no device") -> ProviderStatus:
    return ProviderStatus(name=name, usable=False, installed=True, version="1.0", why_not=why_not)


@pytest.mark.parametrize(
    ("name", "change", "why", "cure"),
    [
        ("cuda", {}, "no NVIDIA driver is loaded", "nvidia-smi"),
        ("nv-tensorrt-rtx", {}, "no NVIDIA driver is loaded", "--gpus all"),
        (
            "webgpu",
            {"has_gpu_node": True, "has_vulkan_loader": False},
            "libvulkan.so.1",
            "apt-get install libvulkan1",
        ),
        ("webgpu", {}, "/dev/dri has no GPU", "--device /dev/dri"),
        ("webgpu", {"has_vulkan_loader": False}, "/dev/dri has no GPU", "--device /dev/dri"),
        ("openvino", {}, "this CPU is AMD EPYC", "--provider openvino@ov/bin/python"),
    ],
)
def test_a_missing_device_is_explained_by_the_machine(
    name: str, change: dict[str, bool], why: str, cure: str
) -> None:
    check = checks.check_provider(idle(name), dataclasses.replace(QUIET, **change))
    assert check is not None and check.status == "warning"
    assert check.message.startswith("it finds no device; ") and why in check.message
    assert cure in check.cure and f"pip uninstall -y {PROVIDERS[name].package}" in check.cure


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("cuda", {"has_nvidia_driver": True}),
        ("webgpu", {"has_gpu_node": True}),
        ("openvino", {"cpu_model": "Intel(R) Core(TM) Ultra 7"}),
        ("openvino", {"has_npu_node": True}),
        ("qnn", {}),
    ],
)
def test_where_the_machine_explains_nothing_the_driver_is_named(name: str, change: dict[str, Any]) -> None:
    hardware = dataclasses.replace(QUIET, **change)
    assert checks.why_no_device(name, hardware) is None
    check = checks.check_provider(idle(name), hardware)
    assert check is not None and check.cure.startswith("with hardware and driver in place")


def test_hardware_is_read_from_the_system(tmp_path: Path) -> None:
    found = doctor.read_hardware("CPU", tmp_path)
    assert not (sys.platform == "linux" and (found.has_gpu_node or found.has_npu_node))
    for name in ("dev/dri/renderD128", "dev/accel/accel0", "proc/driver/nvidia/version"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    found = doctor.read_hardware("CPU", tmp_path)
    assert found.has_gpu_node and found.has_npu_node and found.has_nvidia_driver


def test_a_plugin_newer_than_its_runtime_is_named_with_both_cures(tmp_path: Path) -> None:
    add_distribution(tmp_path, "onnxruntime-qnn", "2.7.0", requires="Requires-Dist: onnxruntime>=1.24.2\n")
    (distribution,) = found_in(tmp_path)
    requires = distribution.requires or []
    versions = {"onnxruntime": "1.23.2", "onnxruntime-qnn": "2.7.0"}
    (check,) = checks.check_requirements("onnxruntime-qnn", requires, versions)
    assert check.status == "warning"
    assert check.message == "onnxruntime-qnn needs onnxruntime>=1.24.2, but 1.23.2 is installed"
    assert "pip install 'onnxruntime>=1.24.2'" in check.cure
    assert "pip uninstall -y onnxruntime-qnn" in check.cure
    (check,) = checks.check_requirements("onnxruntime-qnn", requires, versions | {"onnxruntime": "1.31.1"})
    assert check.status == "ok"


@pytest.mark.parametrize(
    "refusal",
    [
        "The requested API version [26] is not available, only API versions [1, 23] are supported",
        "QNN EP requires ORT >= 1.24 (API 24). Host ORT is 1.23.2 (API 23).",
        'ORT runtime version "1.23.2" is below the minimum required version "1.24.4".',
    ],
)
def test_a_plugin_that_asks_for_a_newer_interface_is_cured_by_newer_packages(refusal: str) -> None:
    check = checks.check_provider(idle("qnn", refusal), QUIET)
    assert check is not None
    assert check.cure.startswith("pip install --upgrade onnxruntime onnxruntime-qnn; else: ")


def test_files_of_another_wheel_are_noticed() -> None:
    check = checks.check_onnxruntime_version({"onnxruntime": "1.31.1"}, "1.24.1")
    assert check is not None and check.status == "problem"
    assert (
        "onnxruntime 1.31.1 is installed" in check.message
        and "imports is onnxruntime 1.24.1" in check.message
    )
    assert check.cure == "pip uninstall -y onnxruntime && pip install --force-reinstall onnxruntime"
    assert checks.check_onnxruntime_version({"onnxruntime-gpu": "1.31.1.post1"}, "1.31.1") is None
    assert checks.check_onnxruntime_version({"onnxruntime": "1.31.1"}, None) is None
    assert checks.check_onnxruntime_version({}, "1.31.1") is None


def test_this_interpreters_onnxruntime_is_the_one_that_is_installed() -> None:
    wheels = checks.onnxruntime_wheels(list(distributions()))
    assert checks.check_onnxruntime_version(wheels, doctor.imported_onnxruntime()) is None


def test_the_largest_cache_is_read_where_the_system_lists_it(tmp_path):
    assert doctor.cache_bytes(tmp_path) is None
    for index, size in enumerate(("48K", "32K", "2048K", "107520K", "?")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
    assert doctor.cache_bytes(tmp_path) == 105 << 20
    (tmp_path / "index4" / "size").write_text("110M\n")
    assert doctor.cache_bytes(tmp_path) == 110 << 20
