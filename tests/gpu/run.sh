#!/usr/bin/env bash
# Everything that needs a GPU, within 8 minutes on one H200: what is there, the kernels' tests on the device, what only a device can show, their errors,
# and the benchmarks.
#
#   tests/gpu/run.sh [--dry-run] [OUTPUT DIRECTORY]
#
# Uses $PYTHON (default python3). It needs torch with CUDA, triton, numpy, a C compiler and Python's headers; the tests also pytest, none of its
# plug-ins; the benchmarks also rich. Nothing is installed or fetched. Each step has a deadline; a failed one fails the script, and those after it
# still run. Leaves log.txt, steps.csv, kernels.csv and kernels.json in the output directory (default build/gpu).
# --dry-run needs no GPU: the same steps, small, on Triton's interpreter; nothing is measured.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
dry=""
[[ "${1:-}" == --dry-run ]] && { dry=--dry-run; shift; }
out=${1:-${OUT:-build/gpu}}
mkdir -p "$out"
export PYTHONPATH="$PWD:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
python=${PYTHON:-python3}
failed=0

step() { # step NAME SECONDS COMMAND...
  local name=$1 budget=$2 began=$SECONDS code last
  shift 2
  printf '\n=== %s: %s\n' "$name" "$*" >>"$out/log.txt"
  timeout --kill-after=5 "$budget" "$@" </dev/null >"$out/step.txt" 2>&1
  code=$?
  ((code)) && failed=1
  cat "$out/step.txt" >>"$out/log.txt"
  last=$(tail -n 1 "$out/step.txt")
  rm -f "$out/step.txt"
  printf '%s,%d,%d,%d,"%s"\n' "$name" "$((SECONDS - began))" "$budget" "$code" "${last//\"/\"\"}" >>"$out/steps.csv"
  printf '%-6s %4d s of %4d s, exit %d: %s\n' "$name" "$((SECONDS - began))" "$budget" "$code" "$last"
}

: >"$out/log.txt"
echo step,seconds,budget,exit,last >"$out/steps.csv"
tests=(tests/gpu tests/kernels --ignore tests/kernels/test_aot.py --ignore tests/kernels/test_accumulation.py --ignore tests/kernels/test_demo.py)
if [[ -n $dry ]]; then
  export TRITON_INTERPRET=1
  step look 60 "$python" -m tests.gpu.look --dry-run
  step tests 420 "$python" -m tests.gpu.shards --processes 2 --seconds 400 -- "${tests[@]}" -k "gpu or kvb or verbatim or arena or merged"
  step bench 300 "$python" -m bench.kernels --dry-run --json "$out/kernels.json" --csv "$out/kernels.csv"
else
  unset TRITON_INTERPRET
  step look 40 "$python" -m tests.gpu.look
  step tests 235 "$python" -m tests.gpu.shards --seconds 225 --also tests.kernels.errors -- "${tests[@]}"
  step bench 190 "$python" -m bench.kernels --seconds 150 --json "$out/kernels.json" --csv "$out/kernels.csv"
fi
exit "$failed"
