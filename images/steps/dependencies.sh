#!/bin/sh
# dependencies.sh LOCK: makes the environment /opt/naru with exactly the packages of a lock file, each checked by hash.
set -eu
. /build/steps/network.sh
uv=/build/tools/bin/uv
"$uv" venv --quiet --python "$(command -v python3)" /opt/naru
"$uv" pip install --quiet --python /opt/naru/bin/python --require-hashes --no-deps --only-binary :all: --requirement "$1"
# The interpreter trusts such bytecode without a look at the source: right in an image, whose files never change.
# Packages bring files for newer Pythons as well (torch does), which do not compile, and are never imported.
/opt/naru/bin/python -m compileall -q --invalidation-mode unchecked-hash /opt/naru/lib ||
    echo "the files above are left without bytecode" >&2
