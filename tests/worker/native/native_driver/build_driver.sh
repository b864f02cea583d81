#!/usr/bin/env bash
# Builds the driver with a sanitizer and runs it: build_driver.sh address,undefined|thread [variant...]
# Without variants: the plain one and the best of this machine.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
root="$(cd "$here/../../../.." && pwd)"
sources="$root/worker/src/naru_worker/native/src"
python="${PYTHON:-python3}"
sanitizer="$1"
shift
names="${*:-plain $(PYTHONPATH="$root/worker/src/naru_worker/native" "$python" -c 'import isa; print(isa.detect_isa())')}"
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
for variant in $names; do
  flags="$(PYTHONPATH="$root/worker/src/naru_worker/native" "$python" -c \
    "import isa; print(' '.join(f for f in isa.VARIANTS['$variant'] if f != '-O3'))")"
  # -O1 keeps a sanitizer's reports readable.
  printf '%s\n' "$sources"/*.cc "$here"/*.cc | xargs -P "$(nproc)" -I{} sh -c \
    "${CXX:-g++} $flags -O1 -g -fno-omit-frame-pointer -fsanitize=$sanitizer -fno-sanitize-recover=all \
     -I'$sources' -I'$here' -c {} -o '$scratch'/\$(basename {} .cc).o"
  "${CXX:-g++}" -pthread "-fsanitize=$sanitizer" "$scratch"/*.o -o "$scratch/driver"
  echo "$variant, $sanitizer"
  "$scratch/driver"
  rm -f "$scratch"/*.o
done
