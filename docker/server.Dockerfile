# The daemon and its command line, without torch:  docker build -f docker/server.Dockerfile -t kvtier .
#
# BASE is any image with Python 3.11 to 3.13 whose C library is glibc 2.28 or later. The build stage may reach a package index; the image needs nothing.
ARG BASE=python:3.12-slim-bookworm

FROM ${BASE} AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY docker/install.sh docker/
COPY kvtier kvtier
COPY kernels/kvtier_kernels kernels/kvtier_kernels
RUN docker/install.sh /opt/kvtier

FROM ${BASE}
COPY --from=build /opt/kvtier /opt/kvtier
RUN groupadd --gid 10001 kvtier \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir / --shell /usr/sbin/nologin kvtier \
 && install -d -o 10001 -g 10001 -m 0755 /run/kvtier \
 && install -d -o 10001 -g 10001 -m 0700 /var/lib/kvtier \
 && install -d /etc/kvtier
ENV PATH=/opt/kvtier/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
VOLUME ["/run/kvtier", "/var/lib/kvtier"]
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 CMD ["kvtier", "status", "--json", "--address", "unix:/run/kvtier/kvtier.sock"]
ENTRYPOINT ["kvtier-server", "--socket", "/run/kvtier/kvtier.sock"]
