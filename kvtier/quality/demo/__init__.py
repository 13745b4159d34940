"""The main job on a real model: KV is stored as FP8, outlives its engine, and is attended to again."""
