"""Bias + squared ReLU: the activation between fc1 and fc2 of a plain MLP."""

from redline.kernels.bias_squared_relu.op import bias_squared_relu, supports

__all__ = ["bias_squared_relu", "supports"]
