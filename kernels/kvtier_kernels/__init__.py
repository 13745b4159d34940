"""The number format of kvtier in torch and, later, triton. Importing the package imports neither: take the module you need.

`kvtier_kernels.reference` is the meaning of the format and the CPU path. Imports torch, triton, numpy and floor 0 of kvtier only.
"""
