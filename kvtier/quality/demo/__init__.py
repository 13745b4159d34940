"""The main job on a real model: KV is stored as FP8, outlives its engine, and is attended to again.

What each file decides:

driver            starts daemon and engines, kills one, checks what was promised
engine            the two processes around the model
block_io          KV of a model into a block's body and back
kernel_attention  the same attention through the Triton kernels
"""
