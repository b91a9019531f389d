"""What can be said of a step on a CUDA device by a machine without one: its kernels, compiled, counted and executed.

`pretend` has every private part of torch, inductor and triton that this stands on; `retarget` sends what was captured
on the CPU to inductor as if it lay on a device; `count` says what came out; `interpret` runs it on CPU tensors.
"""
