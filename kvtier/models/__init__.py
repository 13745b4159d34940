"""What a model's own files say: its caches, the description of its namespace, what fits, and scales to import.

What each file decides:

model_config      config.json: per layer the kind of cache, heads, width, window
checkpoint        the description of a namespace from files alone, and what was assumed
capacity          tokens and sequences that fit; break-even lengths
advice            when quantized KV pays, in sentences
scale_import      KV scales of a checkpoint as an artifact: all or nothing
"""
