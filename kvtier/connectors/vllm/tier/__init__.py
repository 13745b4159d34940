"""kvtier as a secondary tier of vLLM's own CPU offloading."""
