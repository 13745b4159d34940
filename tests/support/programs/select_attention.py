"""Asks vLLM's CudaPlatform, without a GPU, when it selects kvtier's attention backend, and why not. Prints "ok"."""

from __future__ import annotations

import sys
import types
from typing import Any

import torch

for name in ("vllm._C_stable_libtorch", "vllm._C"):
    sys.modules.setdefault(name, types.ModuleType(name))

import vllm.platforms  # noqa: E402
import vllm.platforms.cuda as cuda  # noqa: E402
from vllm.platforms.interface import DeviceCapability  # noqa: E402
from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: E402
from vllm.v1.attention.selector import AttentionSelectorConfig  # noqa: E402

from kvtier.connectors.vllm import backend  # noqa: E402

PLATFORM = cuda.CudaPlatformBase
FINE: list[dict[str, Any]] = [
    {},
    {"kv_cache_dtype": "bfloat16"},
    {"block_size": 48, "use_kv_connector": True},
    {"has_sliding_window": True},
    {"has_sink": True},
    {"dtype": torch.float16},
    {"head_size": 64},
    {"head_size": 256},
    {"capability": (8, 0)},
]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
    ({"head_size": 72}, "head_size"),
    ({"dtype": torch.float32}, "dtype"),
    ({"block_size": 24}, "block_size"),
    ({"use_mla": True}, "MLA"),
    ({"use_mm_prefix": True}, "multimodal"),
    ({"attn_type": "encoder_only"}, "attention type"),
    ({"capability": (7, 5)}, "compute capability"),
    ({"use_non_causal": True}, "non-causal"),
]


def ask(capability: tuple[int, int] = (9, 0), **options: Any) -> str:
    """The path of the class that is selected, or "refused: " and why."""
    PLATFORM.get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(*capability))
    asked = {"head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16, **options}
    try:
        return str(PLATFORM.get_attn_backend_cls(AttentionBackendEnum.CUSTOM, AttentionSelectorConfig(**asked)))
    except ValueError as error:
        return "refused: " + str(error)


def main() -> None:
    vllm.platforms.current_platform.is_cpu = lambda: False
    backend.register()
    backend.register()
    assert AttentionBackendEnum.CUSTOM.get_path() == backend.ON_GPU
    assert not AttentionBackendEnum.CPU_ATTN.is_overridden()
    for options in FINE:
        assert ask(**options) == backend.ON_GPU, (options, ask(**options))
    for options, words in REFUSED:
        said = ask(**options)
        assert said.startswith("refused") and words in said, (options, said)
    made = AttentionBackendEnum.CUSTOM.get_class()
    assert made.kvtier_dual and not made.forward_includes_kv_cache_update and made.supported_kv_cache_layouts() is None
    assert made.get_builder_cls()._cudagraph_support.name == "UNIFORM_SINGLE_TOKEN_DECODE"
    print("ok")


if __name__ == "__main__":
    main()
