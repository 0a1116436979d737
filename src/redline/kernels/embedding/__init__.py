"""Embedding lookup; gradient sorted, deterministic, into main_grad."""

from redline.kernels.embedding.op import Positions, embedding, supports

__all__ = ["Positions", "embedding", "supports"]
