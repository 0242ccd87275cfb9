"""Triton kernels, each beside its PyTorch twin."""
