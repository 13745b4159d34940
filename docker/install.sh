#!/bin/sh
# What the server image is made of, and nothing else: kvtier with its core dependencies and the Redis tier in a virtual environment, without torch.
# Run by server.Dockerfile, and by rootfs.sh where there is no container engine. From the root of the source:  docker/install.sh /opt/kvtier
set -eu
prefix=${1:?"usage: docker/install.sh PREFIX"}
python3 -m venv "$prefix"
"$prefix/bin/pip" install --no-cache-dir --disable-pip-version-check ".[redis]"
"$prefix/bin/python" - <<'PYTHON'
import importlib.metadata
import importlib.util
import sys

names = sorted({distribution.metadata["Name"].lower() for distribution in importlib.metadata.distributions()})
heavy = [name for name in names if name.startswith(("torch", "triton", "nvidia", "vllm", "transformers", "lmcache", "cuda"))]
heavy += [name for name in ("torch", "triton", "vllm", "lmcache") if importlib.util.find_spec(name)]
print("installed:", ", ".join(names))
if heavy:
    sys.exit(f"the server image must not have {', '.join(heavy)}")
PYTHON
"$prefix/bin/kvtier-server" --version
"$prefix/bin/pip" uninstall --yes --quiet pip
