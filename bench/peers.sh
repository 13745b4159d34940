#!/usr/bin/env bash
# Makes the environment of the peers that bench.versus runs: peers.sh [DIRECTORY [PYTHON]]. About 1.5 GB, once; again when this file changes. What cannot be
# had is said on stderr, and bench.versus skips it.
#
# Mooncake: the newest wheel, which alone has the transport over shared memory, is a CUDA build. Where there is no CUDA driver it is given a library in its
# place whose every function answers "no device", as the driver does on a machine without one; it then copies host memory as everywhere. If that wheel cannot
# be imported either, the newest build without CUDA is taken, which is one version older.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
directory=${1:-.venv-peers} python=${2:-python3}
mooncake=mooncake-transfer-engine-cuda13==0.3.14 older=mooncake-transfer-engine-non-cuda==0.3.13.post1
cudart=nvidia-cuda-runtime==13.0.96 nixl=nixl-cu12==1.5.1 torch=torch==2.13.0+cpu

if [[ -f $directory/stamp && $directory/stamp -nt bench/peers.sh && $directory/stamp -nt pyproject.toml ]]; then exit 0; fi

# Mooncake's libraries link to these.
packages=(libibverbs1 ibverbs-providers librdmacm1 libnuma1 liburing2 libcurl4)
missing() {
  local there
  there=$(ldconfig -p)
  for name in libibverbs.so.1 libmlx5.so.1 librdmacm.so.1 libnuma.so.1 liburing.so.2 libcurl.so.4; do
    [[ $there == *"$name"* ]] || return 0
  done
  return 1
}
if missing && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "installing ${packages[*]} (once)" >&2
  export DEBIAN_FRONTEND=noninteractive
  timeout 300 apt-get update -qq >/dev/null 2>&1 || true
  timeout 300 apt-get install -qq -y --no-install-recommends "${packages[@]}" >/dev/null 2>&1 </dev/null || true
fi
if missing; then echo "Mooncake needs ${packages[*]} (Debian, Ubuntu: apt-get install)" >&2; fi

"$directory/bin/python" -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear "$directory"
pip() { "$directory/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }
site=$("$directory/bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
mkdir -p "$directory/lib/cuda"
export LD_LIBRARY_PATH=$PWD/$directory/lib/cuda${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} # bench.versus says the same
works() { "$directory/bin/python" -c "$1" >/dev/null 2>&1; }
why() { "$directory/bin/python" -c "$1" 2>&1 | tail -n 1; }
index=(${KVTIER_TORCH_INDEX:+--extra-index-url "$KVTIER_TORCH_INDEX"})

# A libcuda.so.1 for a machine without a driver, with the functions that Mooncake wants.
no_device() {
  local names
  names=$(nm -D --undefined-only "$site"/mooncake/*.so "$site"/mooncake/mooncake_client "$site"/mooncake/mooncake_master 2>/dev/null | awk '$2 ~ /^cu[A-Z]/ {print $2}' | sort -u)
  for name in $names; do echo "int $name(void) { return 100; }"; done | cc -shared -fPIC -x c - -o "$directory/lib/cuda/libcuda.so.1"
}

{
  echo "installing the peers of bench.versus into $directory (once, some minutes)"
  pip install -qq --editable '.[redis]'
  if ! works 'import mooncake.store'; then
    pip uninstall -qq -y "${older%%==*}" || true
    pip install -qq "$mooncake" "$cudart" && ln -sf "$site"/nvidia/cu13/lib/libcudart.so.13 "$directory/lib/cuda/" || true
    there=$(ldconfig -p)
    [[ $there == *libcuda.so.1* ]] || no_device || echo "no C compiler for a library in the place of the CUDA driver"
  fi
  if ! works 'import mooncake.store'; then
    pip uninstall -qq -y "${mooncake%%==*}" || true
    pip install -qq "$older" || true
  fi
  works 'import mooncake.store' || echo "Mooncake cannot be imported here: $(why 'import mooncake.store')"
  # NIXL's Python layer imports torch; any will do.
  works 'import torch' || pip install -qq "${index[@]}" "$torch" || echo "no package index has $torch: name one that does with KVTIER_TORCH_INDEX"
  works 'import nixl_cu12' || pip install -qq --no-deps "$nixl" || true
  works 'import nixl_cu12._api' || echo "NIXL cannot be imported here: $(why 'import nixl_cu12._api')"
} >&2
touch "$directory/stamp"
