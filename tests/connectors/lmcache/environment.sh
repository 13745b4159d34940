#!/usr/bin/env bash
# Makes the environment of `make test-lmcache`: environment.sh DIRECTORY PYTHON. About 1.4 GB and 2 minutes, once; again when pyproject.toml or
# requirements.txt change. Exit code 3: it cannot be had on this machine, for the reason on stdout.
#
# LMCache is installed without what it declares: that would bring CUDA packages of several gigabytes, of which nothing runs here. The packages that
# its server and its storage manager really import on a CPU stand in requirements.txt, within LMCache's own bounds (protobuf < 7, numpy <= 2.2.6).
set -euo pipefail
directory=$1 python=$2
here=$(dirname "${BASH_SOURCE[0]}")
lmcache=lmcache==0.5.6 torch=torch==2.13.0+cpu # LMCache's compiled parts are linked against one libtorch: the two go together

cannot() {
  echo "$*"
  exit 3
}

if [[ -f $directory/stamp && $directory/stamp -nt pyproject.toml && $directory/stamp -nt $here/requirements.txt ]]; then exit 0; fi
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null ||
  cannot "'$python' is not Python 3.11, 3.12 or 3.13: say make test-lmcache LMCACHE_PYTHON=/path/to/python3.11"
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
  cannot "'$python' cannot make virtual environments (no ensurepip). On Debian and Ubuntu: apt-get install python3-venv"
"$directory/bin/python" -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear "$directory"
index=(${KVTIER_TORCH_INDEX:+--extra-index-url "$KVTIER_TORCH_INDEX"})
install=("$directory/bin/python" -m pip install -qq "${index[@]}")
"$directory/bin/python" -c 'import torch' 2>/dev/null ||
  "${install[@]}" --no-deps --dry-run "$torch" >/dev/null 2>&1 ||
  cannot "no package index has $torch for this Python: name one that does with KVTIER_TORCH_INDEX"
"${install[@]}" --no-deps --dry-run "$lmcache" >/dev/null 2>&1 ||
  cannot "no package index has $lmcache for this Python and processor"
{
  echo "installing $lmcache into $directory (once, some minutes); pip will say that packages which it declares are missing: they are meant to be"
  "${install[@]}" "$torch"
  "${install[@]}" --no-deps "$lmcache"
  "${install[@]}" --requirement "$here/requirements.txt" "$torch"
  "${install[@]}" --editable '.[test]' --requirement "$here/requirements.txt" "$torch"
} >&2
touch "$directory/stamp"
