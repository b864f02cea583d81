# Sourced by build steps that reach a package index. Reads two optional build secrets, so that nothing of the building
# machine is kept in an image: `ca`, a file of certificates to trust, and `index`, a package index's URL. Downloads are
# kept in /mnt, where a builder may mount a folder that outlives the build.
export XDG_CACHE_HOME=/mnt UV_LINK_MODE=copy UV_NO_PROGRESS=1 PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1
if [ -s /run/secrets/ca ]; then
    export SSL_CERT_FILE=/run/secrets/ca PIP_CERT=/run/secrets/ca
fi
if [ -s /run/secrets/index ]; then
    UV_DEFAULT_INDEX="$(cat /run/secrets/index)"
    PIP_INDEX_URL="$UV_DEFAULT_INDEX"
    export UV_DEFAULT_INDEX PIP_INDEX_URL
fi
