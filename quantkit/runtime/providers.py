"""Which execution providers onnxruntime could use, and which of them this machine really has.

A provider comes either compiled into the onnxruntime wheel (built-in) or as a plugin library of its own
package, which must be registered before its devices can be listed. Neither source can be trusted on its
name alone: the GPU wheel lists `CUDAExecutionProvider` on a machine without a GPU, and a plugin registers
happily where it finds no device. So a built-in provider counts as usable once a session keeps it, and a
plugin once `get_ep_devices()` shows a device (`get_available_providers()` does not list plugins reliably).

Registering a plugin: https://onnxruntime.ai/docs/execution-providers/plugin-ep-libraries/
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.metadata
import io
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Literal

# One Relu on four floats, as ONNX bytes: enough for a session to accept or drop a provider, and written out
# so that this package needs no onnx. A test parses it with the onnx checker.
RELU_MODEL = (
    b'\x08\x08:3\n\x0c\n\x01x\x12\x01y"\x04Relu\x12\x01gZ\x0f\n\x01x\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x04'
    b"b\x0f\n\x01y\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x04B\x04\n\x00\x10\x11"
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Provider:
    """One execution provider: how onnxruntime calls it, what brings it, what it asks of machine and graph."""

    name: str
    onnxruntime_name: str
    device_kind: Literal["cpu", "gpu", "npu"]  # what it is mainly for
    source: Literal["built-in", "plugin"]
    package: str  # the PyPI distribution that brings it
    description: str
    needs: str  # what the machine and the graph must offer
    install: str  # the command, or the way, to get it
    platforms: tuple[str, ...] = ("linux", "win32", "darwin")  # values of sys.platform
    package_variants: tuple[str, ...] = ()  # other distributions that hold the same plugin
    plugin_module: str | None = None
    # what a session must pass it, e.g. which of its backends
    session_options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # the same for the wheels that hold it built in
    wheel_options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    emulates_on_cpu: bool = False  # a device of type CPU then means emulation, not the real thing
    keeps_memory_pattern: bool = True  # False: it forbids onnxruntime's plan of buffers made ahead


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProviderStatus:
    """What became of one provider on this machine."""

    name: str
    usable: bool
    installed: bool  # the wheel or plugin that holds it is here
    devices: tuple[str, ...] = ()  # empty too for a built-in provider whose wheel names no device
    version: str | None = None  # of the distribution that holds it
    why_not: str = ""  # one line with the cure; empty when usable


PROVIDERS: dict[str, Provider] = {
    row.name: row
    for row in (
        Provider(
            name="cpu",
            onnxruntime_name="CPUExecutionProvider",
            device_kind="cpu",
            source="built-in",
            package="onnxruntime",
            description="onnxruntime's own CPU kernels (MLAS), in every wheel",
            needs="nothing; INT8 is fast with AVX512-VNNI, AVX-VNNI or Arm DOTPROD/I8MM",
            install="pip install onnxruntime",
        ),
        Provider(
            name="cuda",
            onnxruntime_name="CUDAExecutionProvider",
            device_kind="gpu",
            source="built-in",
            package="onnxruntime-gpu",
            description="NVIDIA GPUs through CUDA and cuDNN",
            needs="NVIDIA driver, CUDA and cuDNN libraries of the versions that the wheel was built with",
            install="pip uninstall -y onnxruntime && pip install onnxruntime-gpu",
            platforms=("linux", "win32"),
        ),
        Provider(
            name="tensorrt",
            onnxruntime_name="TensorrtExecutionProvider",
            device_kind="gpu",
            source="built-in",
            package="onnxruntime-gpu",
            description="NVIDIA GPUs through TensorRT engines, built when a session starts",
            needs="all that cuda needs, and the TensorRT libraries; fixed or profiled shapes start faster",
            install="pip uninstall -y onnxruntime && pip install onnxruntime-gpu tensorrt",
            platforms=("linux", "win32"),
        ),
        Provider(
            name="directml",
            onnxruntime_name="DmlExecutionProvider",
            device_kind="gpu",
            source="built-in",
            package="onnxruntime-directml",
            description="any DirectX 12 GPU on Windows",
            needs="Windows 10 or later and a DirectX 12 device; no memory pattern, sequential execution",
            install="pip uninstall -y onnxruntime && pip install onnxruntime-directml",
            platforms=("win32",),
            keeps_memory_pattern=False,
        ),
        Provider(
            name="coreml",
            onnxruntime_name="CoreMLExecutionProvider",
            device_kind="npu",
            source="built-in",
            package="onnxruntime",
            description="Apple's Neural Engine, GPU and CPU through Core ML; in the macOS wheel",
            needs="macOS; static shapes, or parts of the graph stay on the CPU",
            install="pip install onnxruntime",
            platforms=("darwin",),
        ),
        Provider(
            name="xnnpack",
            onnxruntime_name="XnnpackExecutionProvider",
            device_kind="cpu",
            source="built-in",
            package="onnxruntime",
            description="XNNPACK's CPU kernels, meant for phones; in no desktop wheel on PyPI",
            needs="an onnxruntime built with it; static shapes",
            install="build onnxruntime from source with --use_xnnpack",
        ),
        Provider(
            name="openvino",
            onnxruntime_name="OpenVINOExecutionProvider",
            device_kind="npu",
            source="plugin",
            package="onnxruntime-ep-openvino",
            plugin_module="onnxruntime_ep_openvino",
            description="Intel CPUs, GPUs and NPUs through OpenVINO",
            needs="an Intel CPU, GPU or NPU; the NPU needs static shapes and symmetric weights",
            install="pip install 'quantkit-onnx[openvino]'",
            platforms=("linux", "win32"),
            wheel_options={"device_type": "CPU"},  # onnxruntime-openvino lists no devices to choose from
        ),
        Provider(
            name="qnn",
            onnxruntime_name="QNNExecutionProvider",
            device_kind="npu",
            source="plugin",
            package="onnxruntime-qnn",
            plugin_module="onnxruntime_qnn",
            description="Qualcomm's Hexagon NPU (HTP); the Linux x86-64 wheel emulates it on the CPU",
            needs="a Snapdragon NPU or its emulation; static shapes and a QDQ graph",
            install="pip install 'quantkit-onnx[qnn]'",
            platforms=("linux", "win32"),
            session_options={"backend_type": "htp"},
            emulates_on_cpu=True,
        ),
        Provider(
            name="webgpu",
            onnxruntime_name="WebGpuExecutionProvider",
            device_kind="gpu",
            source="plugin",
            package="onnxruntime-ep-webgpu",
            plugin_module="onnxruntime_ep_webgpu",
            description="any GPU that Vulkan, Direct3D 12 or Metal reaches",
            needs="a GPU with its driver",
            install="pip install 'quantkit-onnx[webgpu]'",
        ),
        Provider(
            name="nv-tensorrt-rtx",
            onnxruntime_name="NvTensorRTRTXExecutionProvider",
            device_kind="gpu",
            source="plugin",
            package="onnxruntime-ep-nv-tensorrt-rtx",
            package_variants=("onnxruntime-ep-nv-tensorrt-rtx-cu13", "onnxruntime-ep-nv-tensorrt-rtx-cu12"),
            plugin_module="onnxruntime_ep_nv_tensorrt_rtx",
            description="NVIDIA RTX GPUs through TensorRT for RTX, engines built on the machine",
            needs="an NVIDIA RTX GPU (Ampere or later), its driver, and plain onnxruntime >= 1.24",
            install="pip install onnxruntime-ep-nv-tensorrt-rtx",
            platforms=("linux", "win32"),
        ),
    )
}


def available_providers() -> tuple[ProviderStatus, ...]:
    """The status of every row of `PROVIDERS`, in its order; nothing that fails here raises."""
    try:
        import onnxruntime  # noqa: PLC0415 - heavy

        built_in = tuple(onnxruntime.get_available_providers())
    except Exception as error:  # a damaged wheel can fail in any way
        reason = f"onnxruntime does not import ({one_line(error)}): pip install --force-reinstall onnxruntime"
        return tuple(
            ProviderStatus(name=name, usable=False, installed=False, why_not=reason) for name in PROVIDERS
        )
    return tuple(_status(provider, onnxruntime, built_in) for provider in PROVIDERS.values())


def provider_status(name: str) -> ProviderStatus:
    """The status of one row alone, so that no other vendor's library is loaded."""
    try:
        import onnxruntime  # noqa: PLC0415 - heavy

        return _status(PROVIDERS[name], onnxruntime, tuple(onnxruntime.get_available_providers()))
    except Exception as error:  # a damaged wheel can fail in any way
        return ProviderStatus(name=name, usable=False, installed=False, why_not=one_line(error))


def open_on(provider: Provider, path: str, options: Any) -> Any:  # noqa: ANN401 - both are onnxruntime's own
    """A session on one provider; what it does not take falls to the CPU, as onnxruntime does it."""
    import onnxruntime  # noqa: PLC0415 - heavy

    options.enable_mem_pattern = provider.keeps_memory_pattern
    if provider.source == "plugin" and _installed_version(provider) is not None:
        options.add_provider_for_devices([chosen_device(provider)], dict(provider.session_options))
        return onnxruntime.InferenceSession(path, options)
    chosen = [(provider.onnxruntime_name, dict(provider.wheel_options))]
    session = onnxruntime.InferenceSession(path, options, providers=chosen, enable_fallback=0)
    if provider.onnxruntime_name not in session.get_providers():
        raise RuntimeError(f"a session drops it for the CPU; it needs: {provider.needs}")
    return session


def chosen_device(provider: Provider) -> Any:  # noqa: ANN401 - an untyped OrtEpDevice
    """The plugin's device of the kind that it is for, or else its first."""
    devices = plugin_devices(provider)
    if not devices:
        raise RuntimeError(f"it finds no device; it needs: {provider.needs}")
    return next(
        (each for each in devices if each.device.type.name.lower() == provider.device_kind), devices[0]
    )


def plugin_devices(provider: Provider) -> list[Any]:
    """The `OrtEpDevice`s of a plugin, registered once per process; an empty list when it cannot be had."""
    import onnxruntime  # noqa: PLC0415 - heavy

    assert provider.plugin_module is not None, f"{provider.name} is built-in"
    if _register_plugin(provider.plugin_module):
        return []
    return _devices(provider, onnxruntime)


def _status(provider: Provider, onnxruntime: ModuleType, built_in: tuple[str, ...]) -> ProviderStatus:
    plugin_version = _installed_version(provider) if provider.source == "plugin" else None
    # The plugin goes first: once it is registered, some versions list it as if it were built in.
    if plugin_version is not None:
        return _plugin_status(provider, plugin_version)
    if provider.onnxruntime_name in built_in:
        return _built_in_status(provider, onnxruntime)
    if sys.platform not in provider.platforms:
        why_not = f"not for {sys.platform}: exists on {', '.join(provider.platforms)}"
    else:
        why_not = f"not installed: {provider.install}"
    return ProviderStatus(name=provider.name, usable=False, installed=False, why_not=why_not)


def _built_in_status(provider: Provider, onnxruntime: ModuleType) -> ProviderStatus:
    """Start a session on it: a wheel lists what it was built with, whether or not a device is there."""
    printed = _preload_gpu_libraries(provider, onnxruntime)
    reason = _session_failure(provider, onnxruntime)
    if not reason:
        return ProviderStatus(
            name=provider.name,
            usable=True,
            installed=True,
            devices=tuple(_device_text(provider, device) for device in _devices(provider, onnxruntime)),
            version=onnxruntime.__version__,
        )
    return ProviderStatus(
        name=provider.name,
        usable=False,
        installed=True,
        version=onnxruntime.__version__,
        why_not=f"in this onnxruntime, but {printed or reason}; it needs: {provider.needs}",
    )


def _preload_gpu_libraries(provider: Provider, onnxruntime: ModuleType) -> str:
    """Load CUDA from pip's nvidia packages, which a session needs; returns what could not be loaded."""
    if provider.name not in ("cuda", "tensorrt") or not hasattr(onnxruntime, "preload_dlls"):
        return ""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(Exception):
        onnxruntime.preload_dlls()
    failures = [line for line in printed.getvalue().splitlines() if line.startswith("Failed to load")]
    return one_line(failures[0]) if failures else ""


def _session_failure(provider: Provider, onnxruntime: ModuleType) -> str:
    """Why a session does not keep this provider, or an empty string."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    # A provider that fails to load logs through the process-wide logger; the reason is returned instead.
    onnxruntime.set_default_logger_severity(4)
    try:
        session = onnxruntime.InferenceSession(
            RELU_MODEL, options, providers=[provider.onnxruntime_name], enable_fallback=0
        )
    except Exception as error:
        return one_line(error)
    finally:
        onnxruntime.set_default_logger_severity(2)  # onnxruntime's default; it has no getter
    if provider.onnxruntime_name in session.get_providers():
        return ""
    return "a session drops it for the CPU (no device or driver, or its libraries do not load)"


def _plugin_status(provider: Provider, version: str) -> ProviderStatus:
    assert provider.plugin_module is not None
    devices = tuple(_device_text(provider, device) for device in plugin_devices(provider))
    if devices:
        return ProviderStatus(
            name=provider.name, usable=True, installed=True, devices=devices, version=version
        )
    reason = _register_plugin(provider.plugin_module) or "it finds no device"
    return ProviderStatus(
        name=provider.name,
        usable=False,
        installed=True,
        version=version,
        why_not=f"{provider.package} {version} is here, but {reason}; it needs: {provider.needs}",
    )


@functools.cache
def _register_plugin(plugin_module: str) -> str:
    """Register a plugin's library with onnxruntime once per process; the reason if that fails."""
    try:
        import onnxruntime  # noqa: PLC0415 - heavy

        if not hasattr(onnxruntime, "register_execution_provider_library"):
            return f"onnxruntime {onnxruntime.__version__} knows no plugins: pip install 'onnxruntime>=1.23'"
        plugin = importlib.import_module(plugin_module)
        names = [plugin.get_ep_name()] if hasattr(plugin, "get_ep_name") else list(plugin.get_ep_names())
        onnxruntime.register_execution_provider_library(names[0], plugin.get_library_path())
    except Exception as error:  # import, dynamic linker and onnxruntime each raise their own kind
        return "" if "already registered" in str(error) else one_line(error)
    return ""


def _devices(provider: Provider, onnxruntime: ModuleType) -> list[Any]:
    if not hasattr(onnxruntime, "get_ep_devices"):  # before 1.23; doctor reports the version itself
        return []
    return [device for device in onnxruntime.get_ep_devices() if device.ep_name == provider.onnxruntime_name]


def _device_text(provider: Provider, device: Any) -> str:  # noqa: ANN401 - an untyped OrtEpDevice
    kind = device.device.type.name
    name = device.device.metadata.get("Description") or device.device.vendor or device.ep_vendor
    note = ", emulation" if provider.emulates_on_cpu and kind == "CPU" else ""
    return f"{kind}{note} ({name})"


def _installed_version(provider: Provider) -> str | None:
    for package in (*provider.package_variants, provider.package):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(package)
    return None


def one_line(error: object, longest: int = 300) -> str:
    """A message without its line breaks, onnxruntime's prefix and the library's path.

    Of a long one the ends are kept, since the cause stands at either.
    """
    text = " ".join(str(error).split())
    text = text.rsplit(" with error: ", maxsplit=1)[-1].removeprefix("[ONNXRuntimeError] : 1 : FAIL : ")
    return text if len(text) <= longest else f"{text[: longest // 3]} ... {text[-(longest * 2 // 3) :]}"
