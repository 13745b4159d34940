"""The same model directory before and after its KV scales change: vLLM's own file tier against kvtier.

Run it in vLLM's environment, which `make test-vllm` makes: .venv-vllm/bin/python -m bench.vllm_scales

The file tier's keys hold the model's path, dtype and block size, not the scales: after the change it answers with hits
and, silently, with wrong tokens. kvtier's namespace holds every live scale: no hit, right tokens. vLLM's tiers refuse
CPU engines, so a worker that copies with memcpy stands in for the one that needs a GPU; keys, files and scheduling are
vLLM's own."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.connectors.vllm.engine import PROMPT, Engine
from tests.connectors.vllm.models import make, scale
from tests.support.daemon import Daemon, MiB

if os.environ.get("KVTIER_FILE_TIER"):  # in the engine, not in the process that starts it
    from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
    from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

    class CopyingWorker(OffloadingWorker):  # type: ignore[misc]
        """memcpy between the engine's blocks and vLLM's CPU pool."""

        def __init__(self, caches: Any, region: Any) -> None:
            self.region, self.done = region, []
            self.engine = [tensor.tensor for tensor in caches.tensors]
            self.host = [region.create_next_worker_view(tensor.page_size_bytes) for tensor in caches.tensors]

        def _copy(self, job: Any, engine_ids: Any, host_ids: Any, out: bool) -> bool:
            began, copied = time.monotonic(), 0
            for mine, theirs in zip(engine_ids, host_ids, strict=True):
                for engine, host in zip(self.engine, self.host, strict=True):
                    host[theirs].copy_(engine[mine]) if out else engine[mine].copy_(host[theirs])
                    copied += engine.shape[1]
            self.done.append(TransferResult(job, True, copied, time.monotonic() - began))
            return True

        def submit_store(self, job_id: Any, src_spec: Any, dst_spec: Any) -> bool:
            return self._copy(job_id, src_spec.block_ids, dst_spec.block_ids, True)

        def submit_load(self, job_id: Any, src_spec: Any, dst_spec: Any, **_: Any) -> bool:
            return self._copy(job_id, dst_spec.block_ids, src_spec.block_ids, False)

        def get_finished(self) -> Any:
            done, self.done = self.done, []
            return done

        def wait(self, job_ids: Any) -> None:
            return

        def shutdown(self) -> None:
            self.engine.clear()
            self.host.clear()
            self.region.cleanup()

    class CpuTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]
        """vLLM's tiering with the worker above."""

        def get_worker(self, kv_caches: Any) -> Any:
            if not self._worker:
                region = SharedOffloadRegion(
                    engine_id=self._engine_id,
                    num_chunks=self.num_chunks,
                    rank=self.config.parallel.rank,
                    kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                    cpu_page_size=self.cpu_page_size_per_worker,
                )
                self._worker = CopyingWorker(kv_caches, region)
            return self._worker


def file_tier(directory: Path) -> dict[str, Any]:
    """vLLM's offloading with its file tier, as `transfer` of an Engine."""
    tier = {"type": "fs", "root_dir": str(directory)}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_connector_module_path": None,
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "bench.vllm_scales",
            "cpu_bytes_to_use": 64 * MiB,
            "secondary_tiers": [tier],
        },
    }


def main() -> None:
    """Prints a table; the exit code is 1 if kvtier is wrong."""
    with tempfile.TemporaryDirectory(prefix="kvtier-scales-") as name, Daemon(128 * MiB) as daemon:
        root = Path(name)
        tiny = make(root / "tiny")
        options = {"environment": {"KVTIER_FILE_TIER": "1"}}
        kinds: dict[str, dict[str, Any]] = {
            "vLLM's file tier": {"transfer": file_tier(root / "files"), **options},
            "kvtier": {},
        }
        rows, right = [], True
        for kind, more in kinds.items():
            scale(tiny, root / "model", 0.05, 0.02)
            with Engine(root / "model", daemon.socket, **more) as before:
                before.run(PROMPT, max_tokens=24)
                time.sleep(3)  # both save in the background
            scale(tiny, root / "model", 0.4, 0.1)
            with Engine(root / "model", None) as plain:
                truth = plain.run(PROMPT, max_tokens=24)["tokens"]
            with Engine(root / "model", daemon.socket, **more) as after:
                found = after.run(PROMPT, max_tokens=24)
            same = found["tokens"] == truth
            rows.append(
                f"{kind:18} {found['cached'] or 0:4} hit tokens   {'right' if same else 'WRONG'} tokens: "
                f"{found['tokens'][:6]}, truth {truth[:6]}"
            )
            right = right and (same or kind != "kvtier")
    print("the same directory, scales changed from 0.05, 0.02 to 0.4, 0.1:", *rows, sep="\n")
    raise SystemExit(not right)


if __name__ == "__main__":
    main()
