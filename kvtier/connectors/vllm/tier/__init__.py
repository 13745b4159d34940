"""A secondary tier of vLLM's own CPU offloading, reached as `kvtier.connectors.vllm_tier`.

What each file decides:

offload_tier      the class that vLLM loads
transfers         loads and stores in threads, questions without waiting
chunks            the namespace and key of a chunk; the tier's settings
"""
