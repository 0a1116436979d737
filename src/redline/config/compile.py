"""[compile]: torch.compile and CUDA graphs."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from redline.config.flags import Section, flag
from redline.config.waits import GRAPH_SCOPES, TRANSFORMER_ENGINE_PARTS, WHOLE_STEP_GRAPHS

GRAPHS = {"cuda_graph_impl": ("local", "transformer_engine", "full_iteration")}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileConfig(Section):
    """Work moved from Python to before the run."""

    title: ClassVar[str] = "Compilation"
    account: ClassVar[str] = "host"

    use_torch_compile: bool = flag(
        False, own=True, help="Compile the block with torch.compile: one graph for all layers."
    )
    cuda_graph_impl: Literal["none", "local", "transformer_engine", "full_iteration"] = flag(
        "none",
        shorthands={
            "--cuda-graph": "local",
            "--enable-cuda-graph": "local",
            "--external-cuda-graph": "transformer_engine",
        },
        refused={"transformer_engine": TRANSFORMER_ENGINE_PARTS, "full_iteration": WHOLE_STEP_GRAPHS},
        help="local: replay forward and backward of a microbatch from one CUDA graph.",
    )
    cuda_graph_scope: tuple[str, ...] = flag(
        (), waits_for=GRAPH_SCOPES, needs=GRAPHS, help="Modules inside the graph."
    )
    cuda_graph_warmup_steps: int = flag(
        3, at_least=1, needs={"cuda_graph_impl": "local"}, help="Steps before the recording."
    )
