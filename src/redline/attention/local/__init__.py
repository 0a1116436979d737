"""Redline's own FlashAttention in Triton, forward and backward.

op.py is what others call; launch.py sets up the kernels of forward.py and backward.py, which share tiles.py;
config.py holds their launch choices. Its plain twin is attention/unfused.py.
"""

from redline.attention.local.op import backward, forward, local_attention, supports, variant_of

__all__ = ["backward", "forward", "local_attention", "supports", "variant_of"]
