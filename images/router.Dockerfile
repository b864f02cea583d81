# A router: the OpenAI and gRPC edge, and where each request goes. See docs/images.md.

# The base should be pinned by digest in releases: name@sha256:…. Any Debian 12 with Python 3.11 or newer will do.
ARG BASE_IMAGE=docker.io/library/debian:bookworm-slim
ARG BUILD_IMAGE=${BASE_IMAGE}

FROM ${BASE_IMAGE} AS base
# tini is process 1: without it a SIGTERM that comes before Python listens would be ignored, and pods would hang about.
ARG RUNTIME_PACKAGES="python3 ca-certificates tini"
COPY images/steps/packages.sh /tmp/packages.sh
RUN sh /tmp/packages.sh ${RUNTIME_PACKAGES} && rm /tmp/packages.sh

FROM ${BUILD_IMAGE} AS build
COPY images/steps/packages.sh /build/steps/
RUN sh /build/steps/packages.sh python3 python3-venv ca-certificates
COPY images/steps/network.sh images/steps/tools.sh /build/steps/
COPY images/requirements/build.txt /build/requirements/
RUN --mount=type=secret,id=ca --mount=type=secret,id=index \
    sh /build/steps/tools.sh /build/requirements/build.txt

FROM build AS dependencies
COPY images/steps/dependencies.sh /build/steps/
COPY images/requirements/router.txt /build/requirements/
RUN --mount=type=secret,id=ca --mount=type=secret,id=index \
    sh /build/steps/dependencies.sh /build/requirements/router.txt

FROM dependencies AS project
WORKDIR /build/naru
COPY images/steps/project.sh /build/steps/
COPY LICENSE README.md hatch_build.py pyproject.toml ./
COPY proto proto
COPY router router
RUN sh /build/steps/project.sh naru-router

FROM base
RUN useradd --key UID_MAX=65532 --key GID_MAX=65532 --uid 65532 --user-group --no-create-home \
    --home-dir /tmp --shell /usr/sbin/nologin naru
# In two steps: a new version of Naru with the same packages is a small layer.
COPY --from=dependencies /opt/naru /opt/naru
COPY --from=project /opt/project /opt/naru
COPY --from=project /build/sbom.json /usr/share/naru/sbom.json
ENV PATH=/opt/naru/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    HOME=/tmp \
    PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# Version and revision are given when it is built: --label org.opencontainers.image.version=…
LABEL org.opencontainers.image.title="naru-router" \
      org.opencontainers.image.description="Naru: the edge and router of many language models" \
      org.opencontainers.image.licenses="Apache-2.0"
USER 65532:65532
WORKDIR /
EXPOSE 8080 8081
ENTRYPOINT ["/usr/bin/tini", "--", "naru-router"]
