"""kvtier's attention backend for vLLM ("dual"): a BF16 cache in which a restored block may hold FP8, read as it lies.

vLLM finds `register` as a plug-in (entry point group `vllm.general_plugins`) in every process of an engine. It only
names the backend:

    a GPU    --attention-backend CUSTOM chooses it
    a CPU    vLLM takes its own backend whatever it is told, and kvtier has none; KVTIER_ATTENTION in the environment
             names a class (its dotted path) to put in that one's place, as tests do

The connector (`kvtier.connectors.vllm`, mode "dual") sees by itself whether it is in use. Without the connector the
backend never meets an FP8 block.

What each file decides:

gpu               the backend's class on a GPU: the Triton kernels
declared          what any backend of kvtier's says of itself, and what none does
flags             which pages hold FP8
"""

from __future__ import annotations

import os

VARIABLE = "KVTIER_ATTENTION"
ON_GPU = "kvtier.connectors.vllm.backend.gpu.GpuDualBackend"


def register() -> None:
    """Called by vLLM, several times in a process. Chooses nothing on a GPU; another's CUSTOM backend stays."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    asked = os.environ.get(VARIABLE, "")
    if asked and not ("." in asked and all(word.isidentifier() for word in asked.split("."))):
        raise ValueError(f"kvtier: {VARIABLE} is the dotted path of a class or not set, not {asked!r:.80}")
    if current_platform.is_cpu():
        if asked:
            register_backend(AttentionBackendEnum.CUSTOM, asked)  # the backend's name has to be one that is known
            register_backend(AttentionBackendEnum.CPU_ATTN, asked)
    elif not AttentionBackendEnum.CUSTOM.is_overridden():
        register_backend(AttentionBackendEnum.CUSTOM, ON_GPU)
