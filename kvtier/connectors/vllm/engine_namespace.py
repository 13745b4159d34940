"""The namespace of a running engine: what its ranks have loaded, merged, and what its configuration says."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from vllm.v1.core.kv_cache_utils import get_none_hash_seed
from vllm.v1.kv_cache_interface import get_kv_cache_spec_sliding_window, iter_layer_specs

from kvtier.connectors.common.ranks import EngineNamespace, RankId, merge, read_reports
from kvtier.connectors.vllm.vllm_settings import VllmSettings
from kvtier.errors import Invalid
from kvtier.format.fingerprint import resolve_revision
from kvtier.format.identity import HashScheme
from kvtier.models.checkpoint import settings_of


class Naming:
    """Made when the ranks have reported. Reads weights' fingerprints, so it may block on disk. Raises Invalid."""

    def __init__(self, config: Any, settings: VllmSettings, reports: dict[RankId, str]) -> None:
        self._config, self._settings = config, settings
        parallel, model = config.parallel_config, config.model_config
        self._ranks = read_reports(reports)
        world = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        if len(self._ranks) != world:
            raise Invalid(f"{len(self._ranks)} ranks have reported what they loaded, not {world}")
        if config.load_config.load_format == "dummy":
            raise Invalid("load_format is dummy: weights made up at each start have no identity")
        name, revision = resolve_revision(str(model.model), model.revision, full=settings.fingerprint == "full")
        computed = {"dtype": str(model.dtype).removeprefix("torch."), "quantization": str(model.quantization)}
        overrides = model.hf_overrides
        if callable(overrides):
            raise Invalid("hf_overrides is a function: what it does to the model cannot be told")
        if overrides:
            text = json.dumps(overrides, sort_keys=True, default=repr)
            computed["overrides"] = blake2b(text.encode(), digest_size=16).hexdigest()
        rope = settings_of(model.hf_text_config, model.max_model_len, computed)
        self._fields = {"model": name, "revision": revision, "rope": rope}

    def namespace(self, tokens: Sequence[int], hash_tokens: int) -> EngineNamespace:
        """The namespace, once the engine's hash seed is final. `tokens` of a block, per group. Raises Invalid."""
        algorithm = self._config.cache_config.prefix_caching_hash_algo
        quick = "xxhash" in algorithm
        if quick and os.environ.get("PYTHONHASHSEED") is None:
            how = "starts from a random seed in each process: set PYTHONHASHSEED, or choose sha256_cbor"
            raise Invalid(f"prefix_caching_hash_algo {algorithm} {how}")
        if any(size % hash_tokens for size in tokens):
            hashes = f"the engine's hashes do, every {hash_tokens} tokens"
            raise Invalid(f"blocks of {list(tokens)} tokens do not end where {hashes}")
        seed = blake2b(get_none_hash_seed().encode(), digest_size=16).hexdigest()
        lookahead = int(getattr(self._config, "num_hash_lookahead_tokens", 0))
        hashing = HashScheme(algorithm, seed, hash_tokens, lookahead, 16 if quick else 32)
        return merge(self._ranks, self._settings.engine_blocks, hashing=hashing, **self._fields)


def window_of(spec: Any) -> int | None:
    """Tokens before the next one whose blocks the engine keeps for a group; None: all of them."""
    if get_kv_cache_spec_sliding_window(spec) is None:
        return None
    one = next(iter(iter_layer_specs(spec)))
    return int(one.sliding_window + one.extra_retained_tokens)
