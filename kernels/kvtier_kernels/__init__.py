"""The number format of kvtier and its kernels, in torch and Triton. Importing the package imports neither.

What each file decides:

reference         the meaning of the number format, in plain torch; also the CPU path
fp8               bits to numbers and back, inside kernels
paged             an engine's cache as kernels see it; FP8 inside a native slot
batch_plan        which bytes of a block belong to which rows of a cache
quantize          pages to block bytes, counting what clips
gather            pages that are FP8 already, verbatim
restore           block bytes to pages
expand            the one fallback that dequantizes
write             new tokens into pages, clearing flags
attention         decode over native and FP8 pages
prefill           chunked prefill over the same
tile              the step that both share
merge             merging parts of attention
transfer          blocks between device and host arena
tuning            launch settings
selftest          whether the kernels may be used on this device
interpreter       Triton's interpreter with the hardware's arithmetic

Imports torch, triton, numpy, and of kvtier `format` and `errors` only.
"""
