"""The Triton kernels as machine code for GPUs that need not be there, and what is known of it without running it."""
