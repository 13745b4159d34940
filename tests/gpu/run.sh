#!/usr/bin/env bash
# Everything that needs a GPU, within 8 minutes on one H200: the kernels' tests on the device, what only a device can show, and the benchmarks.
#
#   tests/gpu/run.sh [--dry-run] [OUTPUT DIRECTORY]
#
# Uses $PYTHON (default python3), which needs torch with CUDA, triton, numpy, pytest, pytest-timeout, hypothesis, rich, typer, xxhash and this package's dependencies.
# --dry-run needs no GPU: the same steps, small, on Triton's interpreter; nothing is measured. Each step has a deadline; a failed one fails the
# script, and those after it still run.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
dry=""
[[ "${1:-}" == --dry-run ]] && { dry=--dry-run; shift; }
out=${1:-${OUT:-tests/gpu/out}}
mkdir -p "$out"
export PYTHONPATH="$PWD:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}"
python=${PYTHON:-python3}
failed=0

step() { # step NAME SECONDS COMMAND...
  local name=$1 budget=$2 began=$SECONDS code
  shift 2
  timeout --kill-after=10 "$budget" "$@" >"$out/$name.txt" 2>&1
  code=$?
  ((code)) && failed=1
  printf '%-12s %4d s of %4d s, exit %d: %s\n' "$name" "$((SECONDS - began))" "$budget" "$code" "$(tail -n 1 "$out/$name.txt")" | tee -a "$out/summary.txt"
}

: >"$out/summary.txt"
if [[ -n $dry ]]; then
  export TRITON_INTERPRET=1
  step kernels 300 "$python" -m pytest -q -p no:cacheprovider tests/kernels -k "kvb or verbatim or arena or merged"
  step device 300 "$python" -m pytest -q -p no:cacheprovider tests/gpu
  step bench 300 "$python" -m bench.kernels --dry-run
else
  unset TRITON_INTERPRET
  step device 120 "$python" -m pytest -q -p no:cacheprovider tests/gpu
  step bench 180 "$python" -m bench.kernels --seconds 120 --json "$out/kernels.json"
  step kernels 170 "$python" -m pytest -q -p no:cacheprovider tests/kernels --deselect tests/kernels/test_aot.py --deselect tests/kernels/test_accumulation.py
fi
exit "$failed"
