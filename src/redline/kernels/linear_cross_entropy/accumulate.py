"""The weight gradient of one chunk of tokens, added inside its GEMM."""

from __future__ import annotations

import torch
from torch import Tensor


def accumulate(main_grad_VH: Tensor, dlogits_CV: Tensor, hidden_CH: Tensor, *, first: bool = False) -> None:
    """main_grad += dlogits^T @ hidden, accumulated in main_grad's dtype inside the GEMM where one exists.

    first: nothing was written to it before; it is written, and not read.
    """
    dtype, beta = main_grad_VH.dtype, 0 if first else 1
    if dlogits_CV.dtype == dtype:
        main_grad_VH.addmm_(dlogits_CV.t(), hidden_CH, beta=beta)
    elif dlogits_CV.is_cuda and dtype == torch.float32:
        torch.addmm(main_grad_VH, dlogits_CV.t(), hidden_CH, out_dtype=dtype, beta=beta, out=main_grad_VH)
    else:
        main_grad_VH.addmm_(dlogits_CV.t().to(dtype), hidden_CH.to(dtype), beta=beta)
