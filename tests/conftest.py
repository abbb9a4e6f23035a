"""Settings for tests on any machine, alone or beside another worker."""

from typing import Any

import onnxruntime
import pytest
from hypothesis import HealthCheck, settings

# A loaded machine draws and runs examples slowly: neither is a failure.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.fixture(scope="session", autouse=True)
def sessions_of_one_thread():
    """Sessions take one thread where nothing says how many: the threads of two workers wait in loops."""
    start = onnxruntime.InferenceSession.__init__

    def started(self: Any, model: Any, sess_options: Any = None, *arguments: Any, **options: Any) -> None:
        sess_options = sess_options or onnxruntime.SessionOptions()
        sess_options.intra_op_num_threads = sess_options.intra_op_num_threads or 1
        start(self, model, sess_options, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnxruntime.InferenceSession, "__init__", started)
        yield


IN_DOUBLE = (
    "test_every_family.py",
    "test_every_transform.py",
    "test_every_calibration.py",
    "test_specification.py",
)


@pytest.fixture(autouse=True)
def masks_in_double(request):
    """Transformers 4.57 makes CLIP's mask in torch's default type, which must hold values of float64."""
    if "clip_text" not in request.node.name or request.node.path.name not in IN_DOUBLE:
        yield
        return
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)
