"""The settings of the vLLM connector, from `kv_connector_extra_config`: read once, checked, refused by name. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvtier.connectors.common.settings_checks import check_choice, check_names, socket_of
from kvtier.connectors.vllm.modes import MODES
from kvtier.errors import Invalid
from kvtier.format.layout import check_int


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """What a user may say.

    socket                 the daemon's socket
    mode                   one of `modes.MODES`; "auto" never quantizes unless kvtier's attention backend is in use
    load                   "async" (between steps, in threads) or "sync" (before the step that needs it; one KV cache
                           group only)
    save_when              "full" (every block as it fills) or "second_hit" (a block that is asked for a second time)
    save_bytes_per_second  what one rank may save at most; 0: no limit
    engine_blocks          engine blocks in one kvtier block: aim at 0.5 to 4 MiB a block
    fail_policy            "refuse" to start where vLLM would fail a request whose load fails (kv_load_failure_policy =
                           fail), or "accept" that
    fingerprint            "sampled" or "full": how local weights are fingerprinted
    """

    socket: str
    mode: str = "auto"
    load: str = "async"
    save_when: str = "full"
    save_bytes_per_second: int = 0
    engine_blocks: int = 1
    fail_policy: str = "refuse"
    fingerprint: str = "sampled"

    def __post_init__(self) -> None:
        choices = {
            "mode": MODES,
            "load": ("async", "sync"),
            "save_when": ("full", "second_hit"),
            "fail_policy": ("refuse", "accept"),
            "fingerprint": ("sampled", "full"),
        }
        for name, allowed in choices.items():
            check_choice(name, getattr(self, name), allowed)
        check_int("save_bytes_per_second", self.save_bytes_per_second, 0, 2**62)
        check_int("engine_blocks", self.engine_blocks, 1, 4096)


def read(extra: Mapping[str, Any], load_failure_policy: str) -> VllmSettings:
    """Settings from vLLM's extra config. Raises Invalid, also for vLLM's default failure policy."""
    known = [field.name for field in fields(VllmSettings)]
    check_names("kv_connector_extra_config", extra, known)
    settings = VllmSettings(**{**extra, "socket": socket_of(extra)})
    if load_failure_policy != "recompute" and settings.fail_policy != "accept":
        raise Invalid(
            f"kv_load_failure_policy is {load_failure_policy!r} (vLLM's default): a block that was lost would end its "
            'request with an error. Write "kv_load_failure_policy": "recompute" in the kv_transfer_config; or, if that '
            'is meant, "fail_policy": "accept" in its kv_connector_extra_config'
        )
    return settings
