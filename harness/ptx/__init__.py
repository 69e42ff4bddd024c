"""Runs the PTX of Triton's kernels without a GPU, and checks what a GPU would not say.

All threads of a block execute an instruction together, as one numpy operation on arrays of a value a thread; blocks run
one after the other. So nothing depends on time, and a race is found by its rule, not by its luck:

* Every access lies in a tensor that the launch knows, and is aligned to its size (`global_memory`).
* A thread reads no global memory that another has written in the launch, and overwrites none with another value.
* Shared memory that one warp writes is read or overwritten by another only after a barrier (`shared_memory`). What is
  copied by ``cp.async`` is there once its group was waited for, and what ``wgmma`` reads stays until then.
* Branches go one way for all threads of a block. Triton branches on scalars alone, so this only refuses kernels that
  cannot run in lock-step.

`program` reads PTX, `block` decodes each instruction once into a function and runs them, with `arithmetic`, `accesses`
and `matrices` for the kinds of instructions. An instruction that is not known raises NotImplementedError: nothing is
left out in silence.

What this cannot show: time; orders of memory accesses that the hardware's weak model permits; rounding in real tensor
cores, whose sums are computed in float64 here and rounded to float32 once an instruction; what ``ptxas`` makes of PTX;
instructions of Blackwell (``tcgen05``) and AMD.
"""
