"""The settings of the LMCache adapter, from `adapter_params`: checked, refused by name. Reads the description files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase

from kvtier.connectors.common.settings_checks import check_names, socket_of
from kvtier.errors import Invalid
from kvtier.format.files import read_description
from kvtier.format.identity import Description

KNOWN = ("namespaces", "socket", "max_capacity_gb")
MAX_MODELS = 64
HELP = """kvtier L2 adapter, adapter_params:
- namespaces (object): the name under which LMCache knows a model -> file with its description (required);
  `kvtier namespace MODEL --save FILE` writes such a file
- socket (str): path of the daemon's socket (default: where kvtier-server listens)
- max_capacity_gb (number): what LMCache's own eviction may fill, in GiB
  (default 0: LMCache evicts nothing here, the daemon does)"""


class KvtierL2AdapterConfig(L2AdapterConfigBase):
    """What a user may say, checked. `descriptions`: by LMCache's name of the model."""

    def __init__(self, descriptions: Mapping[str, Description], socket: str, max_capacity_bytes: int) -> None:
        self.descriptions, self.socket, self.max_capacity_bytes = dict(descriptions), socket, max_capacity_bytes

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> KvtierL2AdapterConfig:
        """Out of `adapter_params`. Raises Invalid, saying what to write: above all where no namespace is given."""
        check_names("adapter_params", d, KNOWN)
        files = d.get("namespaces")
        words = [part for pair in files.items() for part in pair] if isinstance(files, Mapping) else []
        if not isinstance(files, Mapping) or not words or not all(isinstance(part, str) and part for part in words):
            raise Invalid(
                "kvtier does not store what has no identity: LMCache's key holds neither revision nor dtype nor "
                'scales. Write "namespaces": {"MODEL AS LMCACHE NAMES IT": "FILE"} with a file that '
                "`kvtier namespace MODEL --save FILE` has written"
            )
        if len(files) > MAX_MODELS:
            raise Invalid(f"namespaces has at most {MAX_MODELS} models, not {len(files)}")
        socket = socket_of(d)
        capacity = d.get("max_capacity_gb", 0)
        if isinstance(capacity, bool) or not isinstance(capacity, int | float) or not 0 <= capacity < 2**33:
            raise Invalid(f"max_capacity_gb is a number from 0 on, not {capacity!r:.80}")
        descriptions = {model: read_description(Path(file)) for model, file in files.items()}
        return cls(descriptions, socket, int(capacity * 2**30))

    @classmethod
    def help(cls) -> str:
        """For LMCache's command line."""
        return HELP
