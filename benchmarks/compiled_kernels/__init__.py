"""Compiles the Triton kernels for several GPUs, without having them, and reports facts about the machine code."""
