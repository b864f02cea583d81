#!/bin/sh
# project.sh SCRIPT...: builds the project from the working directory, installs it below /opt/project with the named
# console scripts only, and writes the list of all parts of the environment to /build/sbom.json. Needs no network.
set -eu
. /build/steps/network.sh
# No cache: it would give another build's wheel of the same name and version.
export UV_OFFLINE=1 UV_NO_CACHE=1
uv=/build/tools/bin/uv
PATH="/build/tools/bin:$PATH" "$uv" build --quiet --wheel --no-build-isolation --python /build/tools/bin/python \
    --out-dir /build/dist .
UV_FIND_LINKS=/build/dist "$uv" pip install --quiet --python /opt/naru/bin/python --prefix /opt/project --no-deps --no-index naru
for script in /opt/project/bin/*; do
    case " $* " in
        *" ${script##*/} "*) ;;
        *) rm -rf "$script" ;;
    esac
done
for script in "$@"; do
    test -x "/opt/project/bin/$script" || { echo "the project has no console script '$script'" >&2; exit 1; }
done
/opt/naru/bin/python -m compileall -q --invalidation-mode unchecked-hash /opt/project/lib
cp -a /opt/project/. /opt/naru/
/build/tools/bin/cyclonedx-py environment --output-format JSON --output-reproducible \
    --output-file /build/sbom.json /opt/naru/bin/python
