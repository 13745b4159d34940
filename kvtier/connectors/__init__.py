"""Connectors: what lets an engine keep its KV cache in kvtier. Each engine is imported in its own folder only.

What each file decides:

common            what connectors share; no engine is imported there
vllm              vLLM's KV connector, its attention backend and its offloading tier
vllm_tier         the path by which vLLM loads the offloading tier
lmcache           the tier of LMCache's multiprocess server
"""
