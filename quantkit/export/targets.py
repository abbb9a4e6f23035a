"""What an exported file promises to whoever runs it: one row for each target."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A profile of the file."""

    opset: int  # of the standard operators
    ir_version: int
    domains: tuple[str, ...]  # operator sets besides the standard one
    description: str


TARGETS: dict[str, Target] = {
    "cpu": Target(
        opset=21,
        ir_version=10,
        domains=("com.microsoft",),
        description="onnxruntime 1.23 or newer on a CPU: fused operators, float32 between them",
    ),
}
DEFAULT_TARGET = "cpu"
EXTERNAL_FROM_BYTES = 64 << 20  # above this, weights lie in a file beside the graph
