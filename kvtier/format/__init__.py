"""What makes two blocks interchangeable, and every byte of one.

What each file decides:

layout            every size, offset and stride of a block; limits of layers, heads and tokens; slot sizes
identity          a namespace's description and digest; keys; request contexts; token chains; the difference in words
block             the 256 bytes of header, and the check of a block that comes back from anywhere; the checksum
artifact          a scale set on disk: manifest and values, digest, a rank's share, the difference of two
fingerprint       the exact revision of a model: a commit, or a fingerprint of local weights
tensors           safetensors read strictly; regular files only
views             parts and scales of a body as numpy arrays, without a copy
scale_names       which tensor names of checkpoints are KV scales
slots             how large a slab is
files             regular files from disk, with a limit; a description among them
"""
