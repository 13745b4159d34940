"""What connectors share, whatever the engine. No engine is imported here.

What each file decides:

lookups           asking the daemon without holding up a scheduler; when a lookup counts as a miss; heartbeat
worker_pool       threads with a bounded queue, and answers that wait to be fetched
mover             loads and saves in threads, and how long each may take
jobs              what is to be loaded and saved, as plain data
pages             an engine's cache as views, and its way into a block and back
quantizing        BF16 and FP16 caches whose blocks become FP8 as they leave, on a CPU
quantizing_gpu    the same on a GPU, by the Triton kernels
ranks             one namespace out of what all ranks report
lora              which weights an adapter's name means
settings_checks   what all connectors' settings have in common
counters          names of everything that connectors count
objects           an engine's objects (LMCache's, vLLM's chunks) into slots and back
object_naming     namespace, key and request context of an object
"""
