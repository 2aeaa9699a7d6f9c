# A server of one model. For CPUs:
#   docker build -t headrace .
#   docker run -p 30000:30000 -v models:/models headrace /models/qwen3-0.6b
# For NVIDIA GPUs, whose driver comes from the host:
#   docker build -t headrace:cuda --build-arg EXTRAS=server,grammar,cuda \
#     --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128 .
#   docker run --gpus all --ipc host -p 30000:30000 -v models:/models headrace:cuda /models/qwen3-8b
FROM python:3.12-slim

ARG EXTRAS=server,grammar
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

# Triton and torch.compile compile small C files when they start; curl asks for the health.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev g++ curl \
    && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir torch --index-url "$TORCH_INDEX"
COPY pyproject.toml README.md LICENSE /src/
COPY src /src/src
RUN pip install --no-cache-dir "/src[$EXTRAS]" && rm -rf /src

RUN useradd --create-home headrace
USER headrace
ENV HEADRACE_HOST=0.0.0.0 HEADRACE_PORT=30000
EXPOSE 30000
HEALTHCHECK --start-period=10m --interval=10s --timeout=5s \
    CMD curl --fail --silent "http://localhost:$HEADRACE_PORT/health"
# In its own process, so that SIGTERM lets requests end.
ENTRYPOINT ["headrace", "serve"]
