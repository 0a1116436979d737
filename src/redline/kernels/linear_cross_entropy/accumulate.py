"""The weight gradient of one chunk of tokens, added inside its GEMM."""

from __future__ import annotations

import torch
from torch import Tensor


def accumulate(main_grad_VH: Tensor, dlogits_CV: Tensor, hidden_CH: Tensor) -> None:
    """main_grad += dlogits^T @ hidden, accumulated in main_grad's dtype inside the GEMM where one exists."""
    dtype = main_grad_VH.dtype
    if dlogits_CV.dtype == dtype:
        main_grad_VH.addmm_(dlogits_CV.t(), hidden_CH)
    elif dlogits_CV.is_cuda and dtype == torch.float32:
        torch.addmm(main_grad_VH, dlogits_CV.t(), hidden_CH, out_dtype=dtype, out=main_grad_VH)
    else:
        main_grad_VH.addmm_(dlogits_CV.t().to(dtype), hidden_CH.to(dtype))
