"""Recompute in compiled blocks under PyTorch 2.11 and 2.12: the marks reach into autograd Functions.

`torch.utils.checkpoint` under the compiler marks the nodes of a region as ones to be made again. Where a node
is an autograd Function, which Redline's kernels all are, these releases run the graph inside it node by node
with the marks of those inner nodes, which have none: the partitioner then keeps what should be dropped, and
nothing says so. Later releases mark inside too, and have no `tag_nodes` any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch.fx import GraphModule, Node

MARKS = ("recompute", "ac_graph_id")


def mark_inside(graph: GraphModule) -> GraphModule:
    """Give the nodes of the graph that a marked node runs in forward the marks of that node, however deep."""
    for node in graph.graph.nodes:
        marks = {name: node.meta[name] for name in MARKS if name in node.meta}
        inner = _forward_graph(graph, node)
        if inner is not None and marks:
            for each in inner.graph.nodes:
                each.meta |= marks
            mark_inside(inner)
    return graph


def _forward_graph(graph: GraphModule, node: Node) -> GraphModule | None:
    """The first graph that a node is handed: of a Function the one of its forward."""
    first = node.args[0] if node.args else None
    if not (isinstance(first, Node) and first.op == "get_attr"):
        return None
    found = getattr(graph, str(first.target), None)
    return found if isinstance(found, GraphModule) else None


@contextmanager
def marks_inside() -> Iterator[None]:
    """Within, a graph that PyTorch marks is marked inside its Functions too."""
    from torch._higher_order_ops.wrap import TagActivationCheckpoint

    mark: Callable[..., GraphModule] | None = getattr(TagActivationCheckpoint, "tag_nodes", None)
    if mark is None:
        yield
        return

    def marked(*args: Any, **named: Any) -> GraphModule:
        return mark_inside(mark(*args, **named))

    with mock.patch.object(TagActivationCheckpoint, "tag_nodes", staticmethod(marked)):
        yield
