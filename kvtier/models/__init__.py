"""What a model's own files say: its caches, the description of its namespace, what fits, and scales to import."""
