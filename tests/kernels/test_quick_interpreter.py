"""quick_interpreter.py makes Triton's interpreter faster, and leaves every bit of its results alone."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent
SLOW = (
    f"import sys; sys.path.insert(0, {str(FOLDER)!r})\n"
    "import mended_interpreter\n"
    "mended_interpreter.quicken = lambda interpreter: None\n"
    "mended_interpreter.mend()\n"
    "from test_quick_interpreter import digest\n"
    "print(digest())"
)


def digest() -> str:
    """Of what kernels make in 16 bits and in fp32, by rows, in a loop and by atomic sums, some not finite."""
    from redline.kernels.bias_swiglu import bias_swiglu
    from redline.kernels.grad_norm import grad_statistics
    from redline.kernels.rms_norm import rms_norm

    generator = torch.Generator().manual_seed(0)
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        x, weight, bias = (
            torch.randn(*size, generator=generator).to(dtype).requires_grad_()
            for size in ((5, 66), (33,), (66,))
        )
        y = rms_norm(bias_swiglu(x, bias, clamp=0.5, offset=1.0, impl="triton"), weight, 1e-5, impl="triton")
        y.sum().backward()
        found += [y.detach(), x.grad, weight.grad, bias.grad]
        bad = torch.tensor([torch.nan, torch.inf, 0.0]).to(dtype)
        found += [grad_statistics([each.flatten()], impl="triton") for each in (x.grad, bad)]
    return hashlib.sha256(b"".join(each.double().numpy().tobytes() for each in found)).hexdigest()


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU")
def test_its_results_are_those_of_the_interpreter_as_it_is() -> None:
    done = subprocess.run([sys.executable, "-c", SLOW], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == digest()
