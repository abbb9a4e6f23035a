"""A graph in which one weight serves several nodes: blocks that many depths share are stored once.

Nodes are named after the weights they read, so a shared block would name several nodes alike; the second
one is called `name#2`, and so on, and all of them count as computing the same projections.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from quantkit.export.graph import Graph


@dataclass(kw_only=True, slots=True)
class RepeatingGraph(Graph):
    """A graph that numbers repeated labels."""

    labels: Counter[str] = field(default_factory=Counter)

    def ops(
        self,
        op_type: str,
        *inputs: str,
        name: str = "",
        domain: str = "",
        wanted: Sequence[bool] = (True,),
        **attributes: Any,  # noqa: ANN401 - ONNX attributes are of many types
    ) -> list[str]:
        """Add a node under a label of its own."""
        self.labels[name] += 1
        is_again = name and self.labels[name] > 1
        label = f"{name}#{self.labels[name]}" if is_again else name
        # Not `super()`: a dataclass with slots is a new class, which the bare form does not find.
        return Graph.ops(self, op_type, *inputs, name=label, domain=domain, wanted=wanted, **attributes)

    def count_repeated(self) -> None:
        """List the numbered nodes beside the first of their name."""
        for name, layers in list(self.integer_nodes.items()):
            for number in range(2, self.labels[name] + 1):
                self.integer_nodes[f"{name}#{number}"] = layers
