"""Lossless speculative decoding for Llama-family models, written as Triton kernels."""

__version__ = "0.1.0"
