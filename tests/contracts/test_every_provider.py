"""Every row of the providers table: its facts hold, and where it is usable a session starts and computes."""

from __future__ import annotations

import importlib.metadata
import re

import numpy as np
import onnxruntime
import pytest

from quantkit.plan.targets import TARGETS
from quantkit.runtime.providers.status import ProviderStatus, available_providers
from quantkit.runtime.providers.table import (
    PROVIDERS,
    RELU_MODEL,
    Provider,
    plugin_devices,
)


@pytest.fixture(scope="module")
def statuses() -> dict[str, ProviderStatus]:
    return {status.name: status for status in available_providers()}


@pytest.mark.parametrize("name", PROVIDERS)
def test_row_states_true_facts(name: str) -> None:
    provider = PROVIDERS[name]
    assert provider.name == name
    if provider.source != "plugin":  # whose packages bring the names of their own
        assert provider.onnxruntime_name in onnxruntime.get_all_providers()
    assert (provider.plugin_module is not None) == (provider.source == "plugin")
    assert set(provider.platforms) <= {"linux", "win32", "darwin"} and provider.platforms
    assert provider.description and provider.needs and provider.install
    assert provider.target in TARGETS


@pytest.mark.parametrize("name", [row.name for row in PROVIDERS.values() if "[" in row.install])
def test_extra_named_in_the_cure_brings_the_package(name: str) -> None:
    provider = PROVIDERS[name]
    match = re.search(r"quantkit-onnx\[([\w-]+)\]", provider.install)
    assert match is not None
    extra = match.group(1)
    brought = [
        line
        for line in importlib.metadata.requires("quantkit-onnx") or ()
        if re.search(rf"extra == ['\"]{extra}['\"]", line)
    ]
    assert any(line.startswith(provider.package) for line in brought), brought


MARKS = {"qnn": pytest.mark.qnn}  # run where an environment was made for it


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in PROVIDERS])
def test_provider_computes(name: str, statuses: dict[str, ProviderStatus]) -> None:
    status = statuses[name]
    if not status.usable:
        assert name != "cpu", status.why_not
        assert status.why_not and "\n" not in status.why_not
        pytest.skip(status.why_not)
    session = start_session(PROVIDERS[name])
    assert PROVIDERS[name].onnxruntime_name in session.get_providers()
    values = np.array([-1.5, 0.0, 0.25, 3.0], dtype=np.float32)
    (result,) = session.run(None, {"x": values})
    np.testing.assert_allclose(result, [0.0, 0.0, 0.25, 3.0], rtol=2e-3, atol=1e-6)  # FP16 inside is allowed


def start_session(provider: Provider) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if provider.name != "cpu":
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    devices = plugin_devices(provider) if provider.source == "plugin" else []
    if devices:
        options.add_provider_for_devices(devices[:1], dict(provider.session_options))
        return onnxruntime.InferenceSession(RELU_MODEL, options)
    return onnxruntime.InferenceSession(RELU_MODEL, options, providers=[provider.onnxruntime_name])
