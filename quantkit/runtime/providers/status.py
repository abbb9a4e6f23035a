"""Status of each execution provider on this machine: usable, or one line that says why not.

The names that onnxruntime lists prove nothing: the GPU wheel lists `CUDAExecutionProvider` on a machine
without a GPU, and a plugin registers where it finds no device. So a built-in provider counts as usable once a
session keeps it, and a plugin once `get_ep_devices()` shows a device (`get_available_providers()` does not
list plugins reliably).
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import sys

from quantkit.errors import MissingProviderError, not_one_of
from quantkit.runtime.providers.table import (
    PROVIDERS,
    RELU_MODEL,
    Provider,
    device_text,
    devices_of,
    installed_version,
    one_line,
    open_on,
    plugin_devices,
    register_plugin,
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProviderStatus:
    name: str
    usable: bool
    installed: bool  # the wheel or plugin that holds it is here
    devices: tuple[str, ...] = ()  # empty too for a built-in provider whose wheel names no device
    version: str | None = None  # of the distribution that holds it
    why_not: str = ""  # one line with the cure; empty when usable


def available_providers() -> tuple[ProviderStatus, ...]:
    return tuple(provider_status(name) for name in PROVIDERS)


def provider_status(name: str) -> ProviderStatus:
    """Never raises, and loads no other vendor's library."""
    reason = "onnxruntime does not import ({}): pip install --force-reinstall onnxruntime"
    try:
        import onnxruntime

        built_in = tuple(onnxruntime.get_available_providers())
        reason = "{}"
        return _status(PROVIDERS[name], built_in)
    except Exception as error:  # a damaged wheel can fail in any way
        why_not = reason.format(one_line(error))
        return ProviderStatus(name=name, usable=False, installed=False, why_not=why_not)


def require_usable(name: str) -> None:
    """Raise with what is missing where this machine does not run a provider."""
    if name not in PROVIDERS:
        raise not_one_of(name, PROVIDERS, where="--provider", what=f"no provider '{name}'")
    status = provider_status(name)
    if not status.usable:
        raise MissingProviderError(
            f"provider '{name}': {status.why_not}",
            where="--provider",
            next_step="'quantkit doctor' lists what this machine has",
        )


def _status(provider: Provider, built_in: tuple[str, ...]) -> ProviderStatus:
    plugin_version = installed_version(provider) if provider.source == "plugin" else None
    # The plugin goes first: once it is registered, some versions list it as if it were built in.
    if plugin_version is not None:
        return _plugin_status(provider, plugin_version)
    if provider.onnxruntime_name in built_in:
        return _built_in_status(provider)
    if sys.platform not in provider.platforms:
        why_not = f"not for {sys.platform}: exists on {', '.join(provider.platforms)}"
    else:
        why_not = f"not installed: {provider.install}"
    return ProviderStatus(name=provider.name, usable=False, installed=False, why_not=why_not)


def _built_in_status(provider: Provider) -> ProviderStatus:
    """A wheel lists every provider that it was built with, so a session is started on it."""
    import onnxruntime

    load_failure = _preload_gpu_libraries(provider)
    reason = _session_failure(provider)
    option = provider.wheel_options.get("device_type")
    devices = tuple(device_text(provider, device) for device in devices_of(provider))
    return ProviderStatus(
        name=provider.name,
        usable=not reason,
        installed=True,
        devices=() if reason else devices or ((f"{option}, by its option",) if option else ()),
        version=onnxruntime.__version__,
        why_not=reason and f"in this onnxruntime, but {load_failure or reason}; it needs: {provider.needs}",
    )


def _preload_gpu_libraries(provider: Provider) -> str:
    """Load CUDA from pip's nvidia packages, which a session needs; returns the first failure."""
    import onnxruntime

    if provider.name not in ("cuda", "tensorrt") or not hasattr(onnxruntime, "preload_dlls"):
        return ""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(Exception):
        onnxruntime.preload_dlls()
    failures = [line for line in printed.getvalue().splitlines() if line.startswith("Failed to load")]
    return one_line(failures[0]) if failures else ""


def _session_failure(provider: Provider) -> str:
    """Why a session does not keep this provider, or an empty string."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    # A provider that fails to load logs through the process-wide logger; the reason is returned instead.
    onnxruntime.set_default_logger_severity(4)
    try:
        open_on(provider, RELU_MODEL, options)
    except Exception as error:
        return one_line(error)
    finally:
        onnxruntime.set_default_logger_severity(2)  # onnxruntime's default; it has no getter
    return ""


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
