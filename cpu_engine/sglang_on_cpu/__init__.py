"""SGLang on a machine without an accelerator, for tests and for a first look: a platform without CUDA, attention and
kernels in PyTorch, and the hooks that install them. Where there is an accelerator, it does nothing.
"""
