"""What `quantkit package` prints: where the package is and how a device runs it."""

from __future__ import annotations

import json
from pathlib import Path

from quantkit.pipeline.package import pack


def package(*, folder: Path, output: Path | None, target: str | None, force: bool, as_json: bool) -> str:
    """Write it, and say what was written."""
    packed = pack(folder, output, target=target, force=force)
    if as_json:
        document = {"package": str(packed.path), "kind": packed.kind, "bytes": packed.num_bytes}
        return json.dumps({**document, "files": list(packed.files), "notes": list(packed.notes)}, indent=2)
    size = f"{len(packed.files)} files, {packed.num_bytes / 1e6:.1f} MB"
    lines = [
        f"package: {packed.path} ({packed.kind}, {size})",
        f"on the device: pip install onnxruntime tokenizers numpy; {packed.command}",
    ]
    if packed.is_for_npu:
        lines.append("on Qualcomm's NPU: pip install onnxruntime-qnn, and --provider qnn behind the same")
    return "\n".join([*lines, *packed.notes])
