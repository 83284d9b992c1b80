"""Kernels of a CPU as operators of PyTorch (C++), and one of MLA's decoding on CUDA (Triton)."""
