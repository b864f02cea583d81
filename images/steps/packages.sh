#!/bin/sh
# packages.sh NAME...: installs the Debian packages that are not there yet. A base that has them all needs no network.
set -eu
dpkg --status "$@" > /dev/null 2>&1 && exit 0
apt-get update
DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends "$@"
rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/apt /var/log/dpkg.log
