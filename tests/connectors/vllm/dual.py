"""A real engine whose attention backend is kvtier's, with its logits, and an oracle for the flags of its pages.

The oracle follows the scheduler alone: what a step is planned to write holds no FP8, what it loads does. It knows
nothing of slots, kernels or the connector's worker, and is asked about every page that attention reads, in every layer.
Lookups and saves are waited for, so that two engines that are asked the same take the same steps: then even their
logits can be compared bit for bit.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from kvtier.connectors.common import lookups
from kvtier.connectors.vllm.backend import VARIABLE
from tests.connectors.vllm.engine import Child, Engine, main
from tests.support.daemon import PATIENCE

CPU_BACKEND = "tests.connectors.vllm.cpu_backend.CpuDualBackend"


class DualEngine(Engine):
    """`dual` False: vLLM's own backend."""

    program = "tests.connectors.vllm.dual"

    def __init__(
        self,
        model: Path,
        socket: Path | str | None,
        *,
        dual: bool = True,
        environment: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            model, socket, environment={VARIABLE: CPU_BACKEND if dual else "", **(environment or {})}, **options
        )

    def logits(self, directory: Path) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Those of every token since the last call, [tokens, vocabulary]."""
        path = directory / "logits.npy"
        self.ask("logits", path=str(path))
        found: np.ndarray[Any, np.dtype[np.float32]] = np.load(path, allow_pickle=False)
        return found


class DualChild(Child):
    """Keeps logits where everything is in one process."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.kept: list[Any] = []
        self.oracle: Oracle | None = None
        if arguments["extra"].pop("keep_logits", False):
            self._keep()
        self.saved: list[bytes] = []
        super().__init__(arguments)
        if arguments["faults"]:
            lookups.ASK_LATER = PATIENCE
            self._watch_saves()

    def _keep(self) -> None:
        from vllm.model_executor.models.llama import LlamaForCausalLM

        plain = LlamaForCausalLM.compute_logits

        def compute(model: Any, *arguments: Any, **options: Any) -> Any:
            made = plain(model, *arguments, **options)
            self.kept.append(made.float().numpy().copy())
            return made

        LlamaForCausalLM.compute_logits = compute

    def do_logits(self, path: str) -> None:
        np.save(path, np.concatenate(self.kept) if self.kept else np.zeros((0, 0), np.float32), allow_pickle=False)
        self.kept.clear()

    def do_layout(self) -> list[Any]:
        """The first layer's backend, and shape and strides of its cache."""
        layers = self.llm.llm_engine.vllm_config.compilation_config.static_forward_context
        layer = next(iter(layers.values()))
        return [layer.attn_backend.__module__, list(layer.kv_cache.shape), list(layer.kv_cache.stride())]

    def do_counters(self) -> dict[str, float]:
        """The connector's counters as they are, without labels; vLLM's own reader makes whole numbers of them."""
        from prometheus_client import REGISTRY

        found: dict[str, float] = {}
        for metric in REGISTRY.collect():
            for sample in metric.samples:
                if sample.name.startswith("vllm:kvtier_") and sample.name.endswith("_total"):
                    name = sample.name.removeprefix("vllm:kvtier_").removesuffix("_total")
                    found[name] = found.get(name, 0.0) + sample.value
        return found

    def do_watch_flags(self) -> None:
        self.oracle = Oracle(self.llm.llm_engine.engine_core.engine_core.scheduler.connector.scheduler)

    def do_watched_flags(self) -> dict[str, Any]:
        """What the oracle has seen, and the flags as they are."""
        from kvtier.connectors.vllm.backend import flags

        assert self.oracle is not None and flags._flags is not None
        layers = self.llm.llm_engine.model_config.hf_text_config.num_hidden_layers
        seen = {
            "reads": self.oracle.reads // layers,
            "fp8": self.oracle.fp8 // layers,
            "stale": self.oracle.stale,
            "missing": self.oracle.missing,
        }
        return {**seen, "set": int(flags._flags.sum()), "null": int(flags._flags[0])}

    def do_never_clear(self) -> None:
        """A fault: writes leave the flags as they are."""
        from tests.connectors.vllm.cpu_backend import CpuDualImpl

        CpuDualImpl._clear = lambda *_: None

    def do_digests(self, forget: bool = False) -> dict[str, str]:
        """Digest of every block that the daemon has of what was saved so far, by content hash; with `forget` they are
        gone afterwards."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        mover = get_kv_transfer_group().worker.mover
        found = {}
        for hash_ in self.saved:
            for body in mover._client.get(mover._ns, [hash_], range_=mover._ranges[0]):
                found[hash_.hex()] = hashlib.sha256(body.tobytes()).hexdigest()
        if forget:
            assert mover._client.delete(mover._ns, self.saved, range_=mover._ranges[0]) == len(found)
        return found

    def _watch_saves(self) -> None:
        """A step's saves are over before the next step begins, and their hashes are kept for `do_digests`."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        worker = get_kv_transfer_group().worker
        plain = worker.start_saves

        def start(plan: Any) -> None:
            for save in plan.saves:
                self.saved += [hash_ for hash_ in save.run.hashes if hash_ not in self.saved]
            plain(plan)
            assert worker.mover is None or self.do_settle(PATIENCE)

        worker.start_saves = start


class Oracle:
    """What every page must hold, by the scheduler; held against what attention reads. Counts are over all layers."""

    def __init__(self, scheduler: Any) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        from kvtier.connectors.vllm.backend import flags

        self.reads = self.fp8 = self.stale = self.missing = 0
        self._fp8: set[int] = set()
        self._now: frozenset[int] = frozenset()
        worker, size = get_kv_transfer_group().worker, scheduler._block_tokens[0]
        make_plan, fence = scheduler.plan, worker.fence

        def plan(output: Any) -> Any:
            made = make_plan(output)
            for load in made.loads:
                self._fp8 |= {block for run in load.runs for block in run.block_ids()}
            computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
            computed.update(
                zip(output.scheduled_cached_reqs.req_ids, output.scheduled_cached_reqs.num_computed_tokens, strict=True)
            )
            for rid, n in output.num_scheduled_tokens.items():
                for table in output.kv_connector_block_state.get_block_ids(rid):
                    self._fp8 -= set(table[computed[rid] // size : -(-(computed[rid] + n) // size)])
            made.expected = frozenset(self._fp8)
            return made

        def before(made: Any) -> None:
            self._now = made.expected
            fence(made)

        scheduler.plan, worker.fence, flags.watch = plan, before, self._look

    def _look(self, pages: Any, restored: Any) -> None:
        for page, flag in zip(pages.tolist(), restored.tolist(), strict=True):
            self.reads += 1
            self.fp8 += flag
            self.stale += flag and page not in self._now
            self.missing += not flag and page in self._now


if __name__ == "__main__":
    main(DualChild)
