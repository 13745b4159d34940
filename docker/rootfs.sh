#!/bin/bash
# The server image without a container engine: the same steps into a directory, and a run of what came out. As root, on Debian or Ubuntu:
#
#   docker/rootfs.sh build DIR     debootstrap, docker/install.sh inside, the user and directories of server.Dockerfile
#   docker/rootfs.sh try DIR       as uid 10001 without capabilities on a read-only root: daemon, healthcheck, a put and a get by uid 10000, SIGTERM
#
# Needs debootstrap, unshare and setpriv. Wheels are fetched outside with this host's python3.11 and pip settings; inside there is no network to be set up.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
verb=${1:-} root=${2:-}
[ "$(id -u)" = 0 ] && [ -n "$root" ] || { sed -n '2,9p' "$0" >&2; exit 2; }
PYTHON=${PYTHON:-python3.11} # the wheels' version must be that of the tree: Debian 12 has 3.11

build() {
  [ -x "$root/usr/bin/python3" ] || debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm "$root"
  local wheels="$root/tmp/wheels" source="$root/tmp/src"
  rm -rf "$wheels" "$source" "$root/opt/kvtier"
  mkdir -p "$wheels" "$source/docker" "$source/kernels"
  cp pyproject.toml README.md LICENSE "$source/"
  cp docker/install.sh "$source/docker/"
  cp -r kvtier "$source/"
  cp -r kernels/kvtier_kernels "$source/kernels/"
  "$PYTHON" -m pip wheel --quiet --wheel-dir "$wheels" "$source[redis]" 'setuptools>=77' wheel async-timeout # the last: for Pythons before 3.11.3
  chroot "$root" /usr/bin/env -i PATH=/usr/bin:/bin HOME=/ PIP_NO_INDEX=1 PIP_FIND_LINKS=/tmp/wheels sh -c 'cd /tmp/src && docker/install.sh /opt/kvtier'
  rm -rf "$wheels" "$source"
  chroot "$root" sh -c 'getent passwd kvtier >/dev/null || { groupadd --gid 10001 kvtier
    useradd --uid 10001 --gid 10001 --no-create-home --home-dir / --shell /usr/sbin/nologin kvtier; }
    install -d -o 10001 -g 10001 -m 0755 /run/kvtier; install -d -o 10001 -g 10001 -m 0700 /var/lib/kvtier; install -d /etc/kvtier'
  du -sh "$root/opt/kvtier"
}

try_it() {
  root=$(realpath "$root") unshare --mount --pid --fork --kill-child bash -euo pipefail <<'INSIDE'
mount --make-rprivate /
mount --bind "$root" "$root"
mount -t tmpfs tmpfs "$root/run/kvtier"
chown 10001:10001 "$root/run/kvtier"
mount -t tmpfs tmpfs "$root/var/lib/kvtier"
chown 10001:10001 "$root/var/lib/kvtier"
mount -t tmpfs tmpfs "$root/tmp"
mount -t proc proc "$root/proc"
mount -t tmpfs tmpfs "$root/dev"
mknod -m 666 "$root/dev/null" c 1 3
mknod -m 666 "$root/dev/urandom" c 1 9
mount -o remount,ro,bind "$root"
as() { # (as UID COMMAND...): no capabilities, no new privileges, nothing of this environment. Takes the place of its subshell
  local uid=$1; shift
  exec chroot "$root" /usr/bin/env -i PATH=/opt/kvtier/bin:/usr/bin:/bin setpriv --reuid "$uid" --regid "$uid" --clear-groups --bounding-set=-all \
    --inh-caps=-all --no-new-privs "$@"
}
(as 10001 touch /opt/kvtier/x) 2>/dev/null && { echo "the root is writable" >&2; exit 1; }
(as 10001 python3 -c 'import importlib.util, sys; sys.exit(any(importlib.util.find_spec(n) for n in ("torch", "triton", "vllm")))')
(as 10001 kvtier-server --socket /run/kvtier/kvtier.sock --arena-bytes 64MiB --socket-mode 666 --user "uid:10000 engines write" \
  --user "uid:10001 local admin" --ssd path=/var/lib/kvtier/ssd,size=32MiB,free=0 --redis url=redis://127.0.0.1:1) \
  >"$root/tmp/said" 2>"$root/tmp/log" &
daemon=$!
for _ in $(seq 300); do grep -q ^ready "$root/tmp/said" && break; sleep 0.1; done
(as 10001 kvtier status --json --address unix:/run/kvtier/kvtier.sock) >/dev/null # the healthcheck
(as 10000 python3 -) <<'PYTHON'
import numpy as np
from kvtier.client.api import Client
from kvtier.format.identity import CHAIN, Description, HashScheme
from kvtier.format.layout import opaque

description = Description("org/m", "1" * 40, opaque(60000, "ab" * 32, engine_tokens=16), HashScheme(CHAIN, "0", 16))
with Client("unix:/run/kvtier/kvtier.sock") as client:
    ns = client.register(description)
    hashes = [bytes([n]) * 32 for n in range(8)]
    bodies = [np.full(ns.extents().body_bytes, n, np.uint8) for n in range(8)]
    assert client.put(ns, hashes, bodies) == 8
    with client.lease(ns, hashes) as leased:
        assert [int(view[0]) for view in leased] == list(range(8)), leased.reason
    assert client.flush(ns, hashes) == 8, "the SSD has them; Redis is not there"
    print("put, leased and settled 8 blocks as uid 10000; redis:", client.status()["redis_fault"])
PYTHON
kill -TERM $daemon
wait $daemon
grep -q 'event=stopped' "$root/tmp/log" || { cat "$root/tmp/log" >&2; exit 1; }
echo "ended by SIGTERM with 0"
INSIDE
}

case $verb in
  build) build ;;
  try) try_it ;;
  *) sed -n '2,9p' "$0" >&2; exit 2 ;;
esac
