#!/usr/bin/env bash
# Makes the environment of `make test-llmcompressor`: environment.sh DIRECTORY PYTHON. About 1.5 GB and some minutes, once; again when this changes.
# Exit code 3: it cannot be had on this machine, for the reason on stdout.
set -euo pipefail
directory=$1 python=$2
torch=torch==2.13.0+cpu packages=(llmcompressor==0.14.0.1 "transformers>=5.15,<=5.17.0")

cannot() {
  echo "$*"
  exit 3
}

if [[ -f $directory/stamp && $directory/stamp -nt ${BASH_SOURCE[0]} ]]; then exit 0; fi
"$python" -c 'import ensurepip, venv' 2>/dev/null || cannot "'$python' cannot make virtual environments"
"$directory/bin/python" -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear "$directory"
index=(${KVTIER_TORCH_INDEX:+--extra-index-url "$KVTIER_TORCH_INDEX"})
"$directory/bin/python" -c 'import torch' 2>/dev/null ||
  "$directory/bin/python" -m pip install -qq --no-deps --dry-run "${index[@]}" "$torch" >/dev/null 2>&1 ||
  cannot "no package index has $torch: name one that does with KVTIER_TORCH_INDEX"
{
  echo "installing ${packages[0]} into $directory (once, some minutes)"
  "$directory/bin/python" -m pip install -qq "${index[@]}" "$torch" "${packages[@]}"
} >&2 || cannot "${packages[0]} cannot be installed here"
touch "$directory/stamp"
