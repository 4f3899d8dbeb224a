# An image for GPU nodes: CUDA 13's toolkit, and what `make setup-gpu` installs. docs/gpu.md has the commands; it was never built.
ARG BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04
FROM ${BASE}
# The compiler also stays for Triton's and vLLM's kernels, which are made at run time; verbs are for NCCL over InfiniBand.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        build-essential ca-certificates git ibverbs-providers libibverbs1 libnuma1 librdmacm1 make \
        python3.12 python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/megatron_rl
COPY . .
RUN make setup-gpu PYTHON=python3.12 NO_DRIVER=1
ENV PATH=/opt/megatron_rl/.venv/bin:$PATH
CMD ["megatron-rl", "selftest"]
