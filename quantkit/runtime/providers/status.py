"""Which execution providers this machine really has, and in one line why it has not the others.

Neither source can be trusted on its name alone: the GPU wheel lists `CUDAExecutionProvider` on a machine
without a GPU, and a plugin registers happily where it finds no device. So a built-in provider counts as
usable once a session keeps it, and a plugin once `get_ep_devices()` shows a device
(`get_available_providers()` does not list plugins reliably).
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import sys
from types import ModuleType

from quantkit.runtime.providers.table import (
    PROVIDERS,
    RELU_MODEL,
    Provider,
    device_text,
    devices_of,
    installed_version,
    one_line,
    plugin_devices,
    register_plugin,
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProviderStatus:
    """What became of one provider on this machine."""

    name: str
    usable: bool
    installed: bool  # the wheel or plugin that holds it is here
    devices: tuple[str, ...] = ()  # empty too for a built-in provider whose wheel names no device
    version: str | None = None  # of the distribution that holds it
    why_not: str = ""  # one line with the cure; empty when usable


def available_providers() -> tuple[ProviderStatus, ...]:
    """The status of every row of `PROVIDERS`, in its order."""
    return tuple(provider_status(name) for name in PROVIDERS)


def provider_status(name: str) -> ProviderStatus:
    """The status of one provider, for which no other vendor's library is loaded; never raises."""
    reason = "onnxruntime does not import ({}): pip install --force-reinstall onnxruntime"
    try:
        import onnxruntime

        built_in = tuple(onnxruntime.get_available_providers())
        reason = "{}"
        return _status(PROVIDERS[name], onnxruntime, built_in)
    except Exception as error:  # a damaged wheel can fail in any way
        why_not = reason.format(one_line(error))
        return ProviderStatus(name=name, usable=False, installed=False, why_not=why_not)


def _status(provider: Provider, onnxruntime: ModuleType, built_in: tuple[str, ...]) -> ProviderStatus:
    plugin_version = installed_version(provider) if provider.source == "plugin" else None
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
        asked = provider.wheel_options.get("device_type")
        listed = tuple(device_text(provider, device) for device in devices_of(provider, onnxruntime))
        return ProviderStatus(
            name=provider.name,
            usable=True,
            installed=True,
            devices=listed or ((f"{asked}, by its option",) if asked else ()),
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
    devices = tuple(device_text(provider, device) for device in plugin_devices(provider))
    if devices:
        return ProviderStatus(
            name=provider.name, usable=True, installed=True, devices=devices, version=version
        )
    reason = register_plugin(provider.plugin_module) or "it finds no device"
    return ProviderStatus(
        name=provider.name,
        usable=False,
        installed=True,
        version=version,
        why_not=f"{provider.package} {version} is here, but {reason}; it needs: {provider.needs}",
    )
