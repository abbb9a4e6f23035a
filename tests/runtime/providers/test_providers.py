"""Providers: plugins that fail, wheels that list what they cannot use, an onnxruntime that is broken."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest

from quantkit.runtime.providers import table as providers
from quantkit.runtime.providers.status import ProviderStatus, available_providers
from quantkit.runtime.providers.table import PROVIDERS, RELU_MODEL, plugin_devices

MODULES = (
    "quantkit.runtime.providers.table",
    "quantkit.runtime.machine.checks",
    "quantkit.runtime.machine.facts",
)


@pytest.fixture(autouse=True)
def forget_registrations() -> Iterator[None]:
    providers.register_plugin.cache_clear()
    yield
    providers.register_plugin.cache_clear()


class FakeOnnxruntime:
    """The few calls that are made; like the real one it refuses to register a library twice."""

    __version__ = "9.9.9"

    def __init__(
        self, *, built_in: tuple[str, ...] = (), kept: tuple[str, ...] = (), devices: int = 1
    ) -> None:
        self.built_in, self.kept, self.num_devices = built_in, kept, devices
        self.registered: list[str] = []

    def get_available_providers(self) -> list[str]:
        return [*self.built_in, *self.registered]  # some versions list a plugin once it is registered

    def register_execution_provider_library(self, name: str, path: str) -> None:
        if name in self.registered:
            raise RuntimeError(f"EP library is already registered under {name}")
        if not Path(path).exists():
            raise RuntimeError(
                f"[ONNXRuntimeError] : 1 : FAIL : Failed to load library {path} with error: "
                "libmissing.so.1:\ncannot open shared object file"
            )
        self.registered.append(name)

    def get_ep_devices(self) -> list[SimpleNamespace]:
        device = SimpleNamespace(type=SimpleNamespace(name="NPU"), vendor="Acme", metadata={})
        return [
            SimpleNamespace(ep_name=name, ep_vendor="Acme", device=device)
            for name in self.registered
            for _ in range(self.num_devices)
        ]

    def SessionOptions(self) -> SimpleNamespace:
        return SimpleNamespace()

    def set_default_logger_severity(self, level: int) -> None:
        self.severity = level

    def InferenceSession(self, *_: Any, providers: list[tuple[str, Any]], **__: Any) -> SimpleNamespace:
        kept = [name for name, _options in providers if name in self.kept]
        return SimpleNamespace(get_providers=lambda: [*kept, "CPUExecutionProvider"])


def install_plugin(folder: Path, *, has_library: bool) -> None:
    """A site-packages folder with the OpenVINO plugin in it, as pip would leave it."""
    package = folder / "onnxruntime_ep_openvino"
    package.mkdir()
    library = package / "plugin.so"
    if has_library:
        library.write_bytes(b"")
    (package / "__init__.py").write_text(
        f"def get_library_path(): return {str(library)!r}\n"
        "def get_ep_name(): return 'OpenVINOExecutionProvider'\n"
        "def get_ep_names(): return [get_ep_name()]\n"
    )
    metadata = folder / "onnxruntime_ep_openvino-1.2.3.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: onnxruntime-ep-openvino\nVersion: 1.2.3\n"
    )


@pytest.fixture
def site_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "onnxruntime_ep_openvino", raising=False)
    return tmp_path


def status_of(name: str) -> ProviderStatus:
    return next(status for status in available_providers() if status.name == name)


def test_relu_model_is_valid_onnx() -> None:
    model = onnx.load_model_from_string(RELU_MODEL)
    onnx.checker.check_model(model, full_check=True)
    assert [node.op_type for node in model.graph.node] == ["Relu"]


def test_one_status_for_each_row_and_asking_twice_changes_nothing() -> None:
    first = available_providers()
    assert [status.name for status in first] == list(PROVIDERS)
    assert first == available_providers()
    assert status_of("cpu").devices  # the CPU is always named
    for status in first:
        assert status.usable != bool(status.why_not)
        assert "\n" not in status.why_not


def test_unimportable_onnxruntime_is_reported_with_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    statuses = available_providers()
    assert len(statuses) == len(PROVIDERS)
    for status in statuses:
        assert not status.usable
        assert "pip install --force-reinstall onnxruntime" in status.why_not


def test_plugin_with_a_device_is_usable_and_registered_once(
    site_packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_plugin(site_packages, has_library=True)
    fake = FakeOnnxruntime()
    monkeypatch.setitem(sys.modules, "onnxruntime", fake)
    status = status_of("openvino")
    assert status == status_of("openvino")  # the second time some versions list it as if it were built in
    assert (status.usable, status.devices, status.version) == (True, ("NPU (Acme)",), "1.2.3")
    providers.register_plugin.cache_clear()  # as if other code had registered it: the refusal is no failure
    assert len(plugin_devices(PROVIDERS["openvino"])) == 1
    assert fake.registered.count("OpenVINOExecutionProvider") == 1


@pytest.mark.parametrize(
    ("has_library", "reason"),
    [(True, "it finds no device"), (False, "libmissing.so.1: cannot open shared object file")],
)
def test_plugin_that_cannot_serve_says_why(
    site_packages: Path, monkeypatch: pytest.MonkeyPatch, has_library: bool, reason: str
) -> None:
    install_plugin(site_packages, has_library=has_library)
    monkeypatch.setitem(sys.modules, "onnxruntime", FakeOnnxruntime(devices=0))
    status = status_of("openvino")
    assert status.installed and not status.usable
    assert reason in status.why_not and "an Intel CPU, GPU or NPU" in status.why_not
    assert "\n" not in status.why_not and str(site_packages) not in status.why_not


def test_real_onnxruntime_refuses_a_library_that_is_not_there(site_packages: Path) -> None:
    install_plugin(site_packages, has_library=False)
    status = status_of("openvino")
    assert status.installed and not status.usable
    assert "plugin.so" in status.why_not


@pytest.mark.parametrize("kept", [(), ("CUDAExecutionProvider",)])
def test_listed_provider_counts_only_if_a_session_keeps_it(
    monkeypatch: pytest.MonkeyPatch, kept: tuple[str, ...]
) -> None:
    fake = FakeOnnxruntime(built_in=("CUDAExecutionProvider", "CPUExecutionProvider"), kept=kept)
    monkeypatch.setitem(sys.modules, "onnxruntime", fake)
    status = status_of("cuda")
    assert status.installed
    assert status.usable == bool(kept)
    assert fake.severity == 2  # the process's log level is left as it was


def test_old_onnxruntime_without_plugins_is_reported(
    site_packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_plugin(site_packages, has_library=True)
    old = FakeOnnxruntime(built_in=("CPUExecutionProvider",), kept=("CPUExecutionProvider",))
    calls = ("SessionOptions", "InferenceSession", "set_default_logger_severity", "get_available_providers")
    module = SimpleNamespace(__version__="1.20.0", **{name: getattr(old, name) for name in calls})
    monkeypatch.setitem(sys.modules, "onnxruntime", module)
    assert status_of("cpu").usable
    assert "pip install 'onnxruntime>=1.23'" in status_of("openvino").why_not


def test_importing_the_package_loads_nothing_heavy() -> None:
    heavy = ("onnxruntime", "onnx", "torch", "transformers", "numpy")
    code = f"import sys, {', '.join(MODULES)}; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
