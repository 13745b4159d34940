"""What quantized KV costs in quality: calibrate scales, compare native with quantized, say which is bad.

What each file decides:

loaded_model      a model in torch and transformers, which most of this room needs
texts             texts and strata, cut into pieces; a text that is on every machine
observe           magnitudes of K and V per layer, part and head
calibrate         scales from what was observed, as an artifact; sensitivity of layers
uncalibrated      scale 1.0, for who asks for it
schemes           what is done to K and V on their way into a cache
standard_schemes  the schemes that are compared
compare           native against quantized, token by token
retrieval         copying from far back, needles in documents
tasks             free-running answers
checkers          whether an answer is right
outlier_twin      the same function with a few very large channels: a built-in stress
evaluate          one evaluation and its verdict
report            the evaluation on disk
drift             live values against their scales, as metrics; no torch
smollm            SmolLM2-135M in plain torch
demo              `make demo`

Reading order: loaded_model, schemes, observe, calibrate, compare, retrieval, tasks, evaluate, report.
"""
