# A simulated GPU host, for envoy/compose.yaml. From the repository's root, after scripts/build --docker:
#
#   docker build -f envoy/gpu-fleet.Dockerfile -t gpu-fleet .
#
# The base's C library must not be older than that of the machine which built dist/gpu-fleet.
ARG BASE=debian:13.5-slim
FROM ${BASE}
COPY --chown=65534:65534 dist/gpu-fleet /usr/local/bin/
USER 65534:65534
ENTRYPOINT ["gpu-fleet"]
CMD ["--listen", "0.0.0.0:9001", "--slots", "2"]
