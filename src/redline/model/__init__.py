"""The model, for one device or one tensor-parallel rank.

Read in this order: transformer.py, block.py, modules.py, local.py.

    transformer.py  embedding, blocks, final norm, head and loss
    block.py        attention and MLP as four GEMM sites
    modules.py      the parts that own parameters; the site
    ops.py          the record of functions a model computes with: local.py plain, fused.py by kernels/
    local.py        embedding, norm, activation, bias + dropout + residual, loss; rope.py: rotary embedding
    fp8.py          a site whose GEMMs run in fp8; fp8_fused.py: with norm and activation; fp8_gemms.py: all
    gemm.py         the GEMM whose weight gradient is added to main_grad; main_grad.py: the other parameters
    random.py       Philox on tensors: dropout masks, normal draws; init.py: initial weights
    shard_table.py  which logical tensors, or slices of them, each parameter stores
    tensor_parallel.py, parallel_gemm.py  one of several tensor-parallel ranks
    transformer_engine.py  the sites as modules of NVIDIA's package, where it is installed

It knows nothing of data parallelism, recompute, precision recipes or the optimizer: build/ puts those
around it.
"""

from redline.model.fp8_gemms import Fp8Gemms
from redline.model.fp8_params import Fp8Params
from redline.model.fused import fused_ops
from redline.model.init import init_parameters, init_tensors
from redline.model.ops import Ops, local_ops
from redline.model.parallel_gemm import tensor_parallel_ops
from redline.model.random import DropoutState, dropout_keys
from redline.model.shard_table import (
    Stored,
    check_names,
    logical_tensors,
    padding_of,
    parts_of,
    shard_table,
    shared_parameters,
)
from redline.model.tensor_parallel import TensorParallel
from redline.model.transformer import Transformer
from redline.model.transformer_engine import Engine, EngineFp8, te_modules, te_recipe, why_no_engine

__all__ = [
    "DropoutState",
    "Engine",
    "EngineFp8",
    "Fp8Gemms",
    "Fp8Params",
    "Ops",
    "Stored",
    "TensorParallel",
    "Transformer",
    "check_names",
    "dropout_keys",
    "fused_ops",
    "init_parameters",
    "init_tensors",
    "local_ops",
    "logical_tensors",
    "parts_of",
    "shard_table",
    "padding_of",
    "shared_parameters",
    "te_modules",
    "te_recipe",
    "tensor_parallel_ops",
    "why_no_engine",
]
