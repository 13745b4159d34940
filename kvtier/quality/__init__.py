"""What quantized KV costs in quality: calibrate scales, compare native with quantized, say which is bad. Needs torch and transformers.

Reading order: `subject` (a model), `schemes` (what is done to K and V), `observe` and `calibrate` (scales), `compare`, `tasks`, `evaluate`, `report`.
"""
