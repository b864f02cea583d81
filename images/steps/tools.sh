#!/bin/sh
# tools.sh LOCK: makes /build/tools with what builds and lists the environment; none of it gets into an image.
set -eu
. /build/steps/network.sh
python3 -m venv /build/tools
/build/tools/bin/pip install --quiet --require-hashes --no-deps --only-binary :all: --requirement "$1"
