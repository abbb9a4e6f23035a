"""The table of execution providers, and how a session opens on each.

A provider comes either compiled into the onnxruntime wheel (built-in) or as a plugin library of its own
package, which must be registered before its devices can be listed.

Registering a plugin: https://onnxruntime.ai/docs/execution-providers/plugin-ep-libraries/
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.metadata
import platform
from collections.abc import Mapping
from typing import Any, Literal

# One Relu on four floats, as ONNX bytes: enough for a session to accept or drop a provider, and written out
# so that this package needs no onnx. A test parses it with the onnx checker.
RELU_MODEL = (
    b'\x08\x08:3\n\x0c\n\x01x\x12\x01y"\x04Relu\x12\x01gZ\x0f\n\x01x\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x04'
    b"b\x0f\n\x01y\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x04B\x04\n\x00\x10\x11"
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Provider:
    """One execution provider."""

    name: str
    onnxruntime_name: str
    device_kind: Literal["cpu", "gpu", "npu"]  # its main device
    source: Literal["built-in", "plugin"]
    package: str  # the PyPI distribution that holds it
    description: str
    needs: str  # requirements on machine and graph
    install: str  # the command that installs it
    platforms: tuple[str, ...] = ("linux", "win32", "darwin")  # values of sys.platform
    package_variants: tuple[str, ...] = ()  # other distributions that hold the same plugin
    plugin_module: str | None = None
    session_options: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of the plugin
    wheel_options: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of a wheel with it built in
    emulation_options: Mapping[str, str] = dataclasses.field(default_factory=dict)  # added under emulation
    target: str = "cpu"  # the --target whose files it runs whole
    emulates_on_cpu: bool = False  # a device of type CPU then means emulation, not the real thing
    keeps_memory_pattern: bool = True  # False: it forbids onnxruntime's memory pattern
    keeps_compiled: bool = False  # its compiled graph can be written and opened again: tried, not read
    threads_option: str | None = None  # a wheel's own option, where onnxruntime's has no effect


# Both wheels write the folder `onnxruntime`, and quantkit itself asks for the plain one.
GPU_ALONE = "pip uninstall -y onnxruntime && pip install --force-reinstall --no-deps onnxruntime-gpu"
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
            target="gpu",
            description="NVIDIA GPUs through CUDA and cuDNN",
            needs="NVIDIA driver, CUDA and cuDNN libraries of the versions that the wheel was built with",
            install=f"pip install 'quantkit-onnx[cuda]' && {GPU_ALONE}",
            platforms=("linux", "win32"),
        ),
        Provider(
            name="tensorrt",
            onnxruntime_name="TensorrtExecutionProvider",
            device_kind="gpu",
            source="built-in",
            package="onnxruntime-gpu",
            target="gpu",
            description="NVIDIA GPUs through TensorRT engines, built when a session starts",
            needs="all that cuda needs, and the TensorRT libraries; fixed or profiled shapes start faster",
            install=f"pip install 'quantkit-onnx[cuda]' tensorrt && {GPU_ALONE}",
            platforms=("linux", "win32"),
        ),
        Provider(
            name="directml",
            onnxruntime_name="DmlExecutionProvider",
            device_kind="gpu",
            source="built-in",
            package="onnxruntime-directml",
            target="gpu",
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
            target="npu",
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
            target="npu",
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
            target="openvino",
            description="Intel CPUs, GPUs and NPUs through OpenVINO",
            needs="an Intel CPU, GPU or NPU; the NPU needs static shapes and symmetric weights",
            install="pip install 'quantkit-onnx[openvino]'",
            platforms=("linux", "win32"),
            wheel_options={"device_type": "CPU"},  # onnxruntime-openvino lists no devices to choose from
            threads_option="num_of_threads",
        ),
        Provider(
            name="qnn",
            onnxruntime_name="QNNExecutionProvider",
            device_kind="npu",
            source="plugin",
            package="onnxruntime-qnn",
            plugin_module="onnxruntime_qnn",
            target="npu",
            description="Qualcomm's Hexagon NPU (HTP); the Linux x86-64 wheel emulates it on the CPU",
            needs="a Snapdragon NPU (for 16 bits HTP v73) or its emulation; static shapes and a QDQ graph",
            install="pip install 'quantkit-onnx[qnn]'",
            platforms=("linux", "win32"),
            # The second makes integers at the graph's ends its work too, as a ban on fallback does.
            session_options={"backend_type": "htp", "offload_graph_io_quantization": "0"},
            # The first generation that multiplies 16-bit activations: Snapdragon 8 Gen 2 and X Elite.
            emulation_options={"htp_arch": "73"},
            emulates_on_cpu=True,
            keeps_compiled=True,
        ),
        Provider(
            name="webgpu",
            onnxruntime_name="WebGpuExecutionProvider",
            device_kind="gpu",
            source="plugin",
            package="onnxruntime-ep-webgpu",
            plugin_module="onnxruntime_ep_webgpu",
            target="gpu",
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
            target="gpu",
            description="NVIDIA RTX GPUs through TensorRT for RTX, engines built on the machine",
            needs="an NVIDIA RTX GPU (Ampere or later), its driver, and plain onnxruntime >= 1.24",
            install="pip install onnxruntime-ep-nv-tensorrt-rtx",
            platforms=("linux", "win32"),
        ),
    )
}


def open_on(provider: Provider, path: str | bytes, options: Any) -> Any:
    """A session on one provider; nodes that it does not take run on the CPU."""
    import onnxruntime

    from quantkit.runtime.cpu_session import open_on_cpu

    options.enable_mem_pattern = provider.keeps_memory_pattern
    if provider.source == "plugin" and installed_version(provider) is not None:
        options.add_provider_for_devices([chosen_device(provider)], options_of(provider))
        return onnxruntime.InferenceSession(path, options)
    wheel_options = dict(provider.wheel_options)
    if provider.threads_option and options.intra_op_num_threads:
        wheel_options[provider.threads_option] = str(options.intra_op_num_threads)
    chosen = [(provider.onnxruntime_name, wheel_options)]
    if provider.name == "cpu" and isinstance(path, str):
        return open_on_cpu(path, options)
    session = onnxruntime.InferenceSession(path, options, providers=chosen, enable_fallback=0)
    if provider.onnxruntime_name not in session.get_providers():
        raise RuntimeError(
            "a session drops it for the CPU (no device or driver, or its libraries do not load)"
        )
    return session


def options_of(provider: Provider) -> dict[str, str]:
    """The plugin's session options on this machine."""
    emulates = provider.emulates_on_cpu and chosen_device(provider).device.type.name == "CPU"
    return {**provider.session_options, **(provider.emulation_options if emulates else {})}


def chosen_device(provider: Provider) -> Any:
    """The plugin's device of its main kind, or else its first."""
    devices = plugin_devices(provider)
    if not devices:
        raise RuntimeError(f"it finds no device; it needs: {provider.needs}")
    return next(
        (device for device in devices if device.device.type.name.lower() == provider.device_kind), devices[0]
    )


def version_of(provider: Provider) -> str:
    """Version of the distribution that holds the provider."""
    import onnxruntime

    version = installed_version(provider) if provider.source == "plugin" else None
    return version or str(onnxruntime.__version__)


def device_of(provider: Provider) -> str:
    """Kind, name and numbers of the session's device; nothing that changes from start to start."""
    if provider.source != "plugin" or installed_version(provider) is None:
        return f"{provider.onnxruntime_name} on {platform.machine()}"
    chosen = chosen_device(provider)
    numbers = f"{chosen.device.vendor_id:#x}:{chosen.device.device_id:#x}"
    return f"{device_text(provider, chosen)} {numbers} on {platform.machine()}"


def plugin_devices(provider: Provider) -> list[Any]:
    """The `OrtEpDevice`s of a plugin; none where it cannot be registered."""
    assert provider.plugin_module is not None, f"{provider.name} is built-in"
    return [] if register_plugin(provider.plugin_module) else devices_of(provider)


@functools.cache
def register_plugin(plugin_module: str) -> str:
    """Register a plugin's library once per process; the reason where that fails."""
    try:
        import onnxruntime

        if not hasattr(onnxruntime, "register_execution_provider_library"):
            return f"onnxruntime {onnxruntime.__version__} knows no plugins: pip install 'onnxruntime>=1.23'"
        plugin = importlib.import_module(plugin_module)
        names = [plugin.get_ep_name()] if hasattr(plugin, "get_ep_name") else list(plugin.get_ep_names())
        onnxruntime.register_execution_provider_library(names[0], plugin.get_library_path())
    except Exception as error:  # import, dynamic linker and onnxruntime each raise their own kind
        return "" if "already registered" in str(error) else one_line(error)
    return ""


def devices_of(provider: Provider) -> list[Any]:
    """The `OrtEpDevice`s that onnxruntime lists under the provider's name."""
    import onnxruntime

    if not hasattr(onnxruntime, "get_ep_devices"):  # before 1.23; doctor reports the version itself
        return []
    return [device for device in onnxruntime.get_ep_devices() if device.ep_name == provider.onnxruntime_name]


def device_text(provider: Provider, device: Any) -> str:
    kind = device.device.type.name
    name = device.device.metadata.get("Description") or device.device.vendor or device.ep_vendor
    note = ", emulation" if provider.emulates_on_cpu and kind == "CPU" else ""
    return f"{kind}{note} ({name})"


def installed_version(provider: Provider) -> str | None:
    """Version of the plugin's package, in any of its variants."""
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
