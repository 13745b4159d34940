"""What quantized KV costs in quality: calibrate scales, compare native with quantized, say which is bad.

What each file decides:

subject           a model to be looked at; needs torch and transformers, as most of this room does
data              texts and strata, cut into pieces
observe           magnitudes of K and V per layer, part and head
calibrate         scales from what was observed, as an artifact; sensitivity of layers
schemes           what is done to K and V on their way into a cache
standard          the schemes that are compared
compare           native against quantized, token by token
tasks             retrieval and free answers
checkers          whether an answer is right
evaluate          one evaluation and its verdict
report            the evaluation on disk
twin              the outlier twin
drift             live values against their scales, as metrics; no torch
unit              scale 1.0, for who asks for it
smollm            SmolLM2-135M in plain torch
texts             English text that every Python brings
demo              `make demo`

Reading order: subject, schemes, observe, calibrate, compare, tasks, evaluate, report.
"""
