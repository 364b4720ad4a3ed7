#!/usr/bin/env bash
# Measures jaxaudit on this machine's GPU: bash experiments/gpu/run.sh OUT [options of measure_gpu.py]
# With WHEELS=DIR, packages are installed from there into a folder of their own first; no network is needed.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${1:?usage: run.sh OUT [options of measure_gpu.py]}
shift
mkdir -p "$out"
(nvidia-smi || true; lscpu; free -g; df -h "${TMPDIR:-/tmp}") >"$out/machine.txt" 2>&1
echo "${COMMIT:-$(git -C "$here" describe --always --dirty 2>/dev/null || echo unknown)}" >"$out/commit.txt"
if [ -n "${WHEELS:-}" ]; then
  site=$(mktemp -d)
  trap 'rm -rf "$site"' EXIT
  "${PYTHON:-python3}" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
    --target "$site" "$WHEELS"/*.whl >>"$out/log.txt" 2>&1
  export PYTHONPATH=$site
fi
AUDITS=${AUDITS:-$(mktemp -d)} "${PYTHON:-python3}" "$here/measure_gpu.py" "$out" "$@"
