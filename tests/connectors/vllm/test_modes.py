"""What a mode refuses, by name; and vLLM's own selection of the backend on a GPU, whose rules are asked without one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer import kv_transfer_state

from kvtier.connectors.common.pages import GroupCaches, PartCache
from kvtier.connectors.vllm import modes
from kvtier.connectors.vllm.backend import flags
from kvtier.connectors.vllm.vllm_settings import read
from kvtier.errors import Invalid
from kvtier.format.layout import Part
from tests.connectors.vllm.engine import Engine
from tests.support.daemon import ROOT

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


def engine(
    dtype: str = "auto", hash_tokens: int | None = 16, blocks: tuple[int, ...] = (16,), context_parallel: int = 1
) -> tuple[Any, Any]:
    """The parts of vLLM's configuration that decide: (vllm_config, kv_cache_config)."""
    config = SimpleNamespace(
        cache_config=SimpleNamespace(cache_dtype=dtype, hash_block_size=None),
        parallel_config=SimpleNamespace(decode_context_parallel_size=context_parallel, prefill_context_parallel_size=1),
    )
    groups = [SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=size)) for size in blocks]
    return config, SimpleNamespace(hash_block_size=hash_tokens, kv_cache_groups=groups)


def group(dtype: str = "bf16", kind: str = "attention", granularity: str = "none") -> GroupCaches:
    part = PartCache(Part("k", 64, dtype, granularity), torch.zeros(1, dtype=torch.uint8))
    return GroupCaches({"kind": kind}, True, 1, [("model.layers.0.attn", [part])])


def module(ours: bool = True, shared: str | None = None) -> dict[str, Any]:
    found = SimpleNamespace(attn_backend=SimpleNamespace(kvtier_dual=ours), kv_sharing_target_layer_name=shared)
    return {"model.layers.0.attn": found, "model.layers.0.experts": SimpleNamespace()}


@pytest.mark.parametrize(
    ("mode", "options", "words"),
    [
        ("dual", {"dtype": "fp8"}, "the cache is kept as fp8"),
        ("expand", {"dtype": "fp8_e5m2"}, "the cache is kept as fp8_e5m2"),
        ("dual", {"context_parallel": 2}, "context parallelism"),
        ("dual", {"hash_tokens": 8}, "hash_block_size is 8"),
        ("dual", {"blocks": (16, 32)}, "hash_block_size is 16"),
    ],
)
def test_a_configuration_that_breaks_a_mode_is_refused_at_the_start(
    mode: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(Invalid, match=f"mode {mode}: .*{words}"):
        modes.check(mode, *engine(**options))
    modes.check("auto", *engine(**options))


@pytest.mark.parametrize(
    ("mode", "caches", "modules", "words"),
    [
        ("dual", group(kind="latent"), module(), "MLA latent"),
        (
            "dual",
            group(),
            module(shared="model.layers.5.attn"),
            "layer model.layers.0.attn uses the cache of model.layers.5.attn",
        ),
        ("expand", group("fp32"), module(), "fp32"),
        ("dual", group(), module(ours=False), "--attention-backend CUSTOM"),
        ("passthrough", group(), module(), "not FP8"),
        ("native", group("e4m3fn", granularity="tensor"), module(), "is FP8"),
    ],
)
def test_layers_that_a_mode_cannot_keep_are_refused_by_name(
    mode: str, caches: GroupCaches, modules: dict[str, Any], words: str
) -> None:
    with pytest.raises(Invalid, match=f"mode {mode}: .*{words}"):
        modes.choose(mode, *engine(), [caches], modules)


def test_another_connector_beside_dual_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", SimpleNamespace())
    with pytest.raises(Invalid, match="no connector stands beside this one"):
        modes.choose("dual", *engine(), [group()], module())
    assert modes.choose("expand", *engine(), [group()], module()) == "expand"


def test_the_mode_that_nobody_asked_for() -> None:
    assert (
        modes.choose("auto", *engine(), [group("e4m3fn", granularity="tensor"), None], module(ours=False))
        == "passthrough"
    )
    assert modes.choose("auto", *engine(), [group()], module(ours=False)) == "native"
    assert modes.choose("auto", *engine(), [group()], module()) == "dual"
    assert modes.choose("auto", *engine(hash_tokens=8), [group()], module()) == "native"
    with pytest.raises(Invalid, match="mode is one of"):
        read({"mode": "fast"}, "recompute")


def test_an_explicit_dual_without_its_backend_turns_the_connector_off(tiny: Path, tmp_path: Path) -> None:
    """A real engine: it runs, as without kvtier, and says why."""
    with Engine(tiny, tmp_path / "nobody", block_size=32, settings={"mode": "dual"}) as made:
        assert made.run(list(range(5, 100)), max_tokens=1)["reason"] == "length"
        assert "kvtier is OFF" in made.said() and "kvtier's attention backend is not in use" in made.said()


def test_flags_follow_the_cache_until_it_is_fixed() -> None:
    before = flags._flags, flags._fixed
    try:
        flags._flags, flags._fixed = None, False
        assert flags.of(torch.zeros(7, 1)).shape == (7,) and flags.of(torch.zeros(9, 1)).shape == (9,)
        flags.of(torch.zeros(9, 1))[3] = 1
        fixed = flags.fix(torch.zeros(9, 1))
        assert fixed.tolist() == [0] * 9 and flags.of(torch.zeros(9, 5)) is fixed
        with pytest.raises(RuntimeError, match="another cache"):
            flags.of(torch.zeros(7, 1))
    finally:
        flags._flags, flags._fixed = before


def test_vllm_selects_the_backend_on_a_gpu_and_refuses_what_it_lacks() -> None:
    """CudaPlatform's own rules, with a capability that is made up: no GPU is there, and no kernel runs."""
    command = [sys.executable, "-m", "tests.support.programs.select_attention"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0 and done.stdout.strip().endswith("ok"), done.stderr[-3000:]


def test_the_gpus_backend_takes_the_steps_that_the_cpus_does() -> None:
    """On Triton's interpreter: writes, flags and attention of both classes, as vLLM calls them."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-m", "tests.connectors.vllm.dual_step"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len({line.split(":")[0] for line in done.stdout.splitlines() if ":" in line}) == 6
