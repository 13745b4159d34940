# The engine's side: client, connectors and kernels on an image that has torch, Triton and the engine:  docker build -f docker/gpu.Dockerfile -t kvtier-gpu .
#
# BASE is that image; its torch, Triton and engine stay as they are: the build fails if installing kvtier would change one of them.
ARG BASE=vllm/vllm-openai:v0.32.0
FROM ${BASE}
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY docker/beside.sh docker/
COPY kvtier kvtier
COPY kernels/kvtier_kernels kernels/kvtier_kernels
RUN docker/beside.sh
WORKDIR /
ENV PYTHONUNBUFFERED=1
# The engine runs as the user that its image names; the daemon's setting `users` must have that uid. The daemon's directory is mounted at /run/kvtier.
