"""Rotary position embedding, in place on q and k inside the merged projection, or on q and k apart."""

from redline.kernels.rotary.op import rotary, rotary_qkv, supports

__all__ = ["rotary", "rotary_qkv", "supports"]
