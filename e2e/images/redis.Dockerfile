# Redis for tests on a machine without a registry: what docker.io/library/redis is elsewhere, as far as the chart uses it.
ARG BASE_IMAGE
FROM ${BASE_IMAGE}
COPY images/steps/packages.sh /tmp/packages.sh
RUN sh /tmp/packages.sh redis-server redis-tools && rm /tmp/packages.sh \
    && usermod --uid 999 redis && install -d -o redis /data
USER 999
WORKDIR /data
EXPOSE 6379
CMD ["redis-server"]
