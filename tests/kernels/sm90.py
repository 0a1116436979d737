"""Compiles kernels for Hopper without a GPU and reads the machine code. Run as a script, not interpreted."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

from sm90_forms import FLOATS, KERNELS, ODD, Kernel


def compile_for_hopper(kernel: Kernel) -> tuple[bytes, int]:
    """The machine code of a kernel for sm_90, and the bytes of shared memory that it takes."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    place, _, name = kernel.place.partition(":")
    module = import_module(f"redline.kernels.{place}")
    fn = getattr(module, name)
    fn = getattr(fn, "kernel", None) or fn  # as launch.py wraps it
    given, num_warps, registers = kernel.constants, kernel.num_warps, kernel.registers
    if kernel.tile is not None:
        tile = import_module("redline.kernels.fp8.tiles").TILES[kernel.tile]
        num_warps = tile.warps
        given = {
            "BLOCK_ROWS": tile.rows,
            "BLOCK_COLS": tile.cols,
            "GROUP": tile.group,
        } | given
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    free = {param.name for param in fn.params if param.do_not_specialize}  # Triton knows nothing of these
    given = {arg: value for arg, value in given.items() if arg not in free}
    for index, arg in enumerate(fn.arg_names):
        pointer = arg.removesuffix("_ptr")
        if arg in given or (arg.endswith("_ptr") and pointer not in kernel.pointers):
            signature[arg], constants[(index,)] = "constexpr", given.get(arg)
        elif arg in FLOATS:
            signature[arg] = "fp32"
        else:
            signature[arg] = f"*{kernel.pointers[pointer]}" if arg.endswith("_ptr") else "i32"
            if arg not in ODD | kernel.odd | free:
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=fn, signature=signature, constexprs=constants, attrs=attributes)
    target = GPUTarget("cuda", 90, 32)
    options = {"num_warps": num_warps, "maxnreg": registers}
    compiled = triton.compile(source, target=target, options=options)
    return compiled.asm["cubin"], compiled.metadata.shared


def faults(kernel: Kernel, cubin: bytes, shared: int) -> list[str]:
    """Too much shared memory, and what the machine code shows: spills, 2-byte accesses, a lost register."""
    import triton

    disassembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        # code alone, and nothing about where its values come from: a third of the time
        command = [disassembler, "-c", "-ndf", file.name]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    spilled = re.findall(r"\b(?:LDL|STL)[.\w]*", listing)
    found = [] if kernel.spills else sorted(set(spilled))
    found += [f"{shared} bytes of shared memory"] if shared > kernel.shared else []
    # The stack pointer as a number: what ptxas takes where it has lost the register of a value.
    lines = [line for line in listing.splitlines() if not re.search(r"\[R1\b|R1, c\[0x0\]|R1, R1,", line)]
    found += [f"R1 as a number: {line.split(';')[0].strip()}" for line in lines if re.search(r"\bR1\b", line)]
    if kernel.wide:
        found += sorted(set(re.findall(r"\b(?:LDG|STG)[.\w]*\.U16\b", listing)))
        found += [] if re.search(r"\bSTG\.E\.128\b", listing) else ["no STG.E.128"]
    if kernel.ahead and "LDG.E.128" in listing.partition("MUFU.EX2")[2]:
        found += ["a load behind the first exponential"]
    if kernel.draws:  # the first product of a draw waits for nothing, so some may stand anywhere
        early, late = listing.rsplit("LDG.E.128", 1)
        products = [len(re.findall("IMAD.* -0x2daee0ad|IMAD.* -0x326172a9", part)) for part in (early, late)]
        found += ["a load behind the draw"] if 8 * products[0] > products[1] else []
    return found


def main() -> int:
    failed = 0
    for kernel in KERNELS:
        found = faults(kernel, *compile_for_hopper(kernel))
        failed += bool(found)
        print(kernel.place, *found, sep=" " if found else "", end=" FAULTS\n" if found else " ok\n")
    return failed


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    sys.exit(main())
