#!/bin/sh
# Installs kvtier beside an engine, into whatever python3 is, and changes none of the packages that the engine stands on. From the root of the source.
set -eu
python3 - <<'PYTHON' >/tmp/kvtier-pinned.txt
import importlib.metadata

pinned = ("torch", "torchvision", "torchaudio", "triton", "vllm", "lmcache", "transformers", "numpy", "protobuf")
for name in pinned:
    try:
        print(f"{name}=={importlib.metadata.version(name)}")
    except importlib.metadata.PackageNotFoundError:
        pass
PYTHON
grep -q '^torch==' /tmp/kvtier-pinned.txt || { echo "this image has no torch: take an engine's image as BASE" >&2; exit 1; }
python3 -m pip install --no-cache-dir --disable-pip-version-check --constraint /tmp/kvtier-pinned.txt .
while read -r line; do
  python3 -c 'import importlib.metadata, sys; name, _, version = sys.argv[1].partition("=="); sys.exit(importlib.metadata.version(name) != version)' "$line" ||
    { echo "installing kvtier has changed ${line%%==*}" >&2; exit 1; }
done </tmp/kvtier-pinned.txt
rm /tmp/kvtier-pinned.txt
python3 -c 'import kvtier, kvtier.client.api, kvtier.format.views, kvtier_kernels; print("kvtier", kvtier.__version__)'
