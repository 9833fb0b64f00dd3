# CPU by default. For a CUDA machine, build with
#   --build-arg BASE=nvidia/cuda:12.9.1-runtime-ubuntu24.04 --build-arg TORCH=torch --build-arg EXTRAS=gpu,dev
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}

ARG TORCH=torch==2.13.0+cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=engine,dev

# iproute2 shapes the link where the container may (--cap-add NET_ADMIN --cap-add SYS_ADMIN);
# without those capabilities the userspace relay does. gcc builds the modules in C.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc iproute2 libc6-dev make python3 python3-dev python3-pip python3-venv \
 && rm -rf /var/lib/apt/lists/*

WORKDIR /prfaas-bench
RUN python3 -m venv .venv \
 && .venv/bin/python -m pip install --no-cache-dir --extra-index-url "${TORCH_INDEX}" "${TORCH}"

COPY pyproject.toml setup.py README.md LICENSE ./
COPY native native
COPY workloads workloads
COPY engine engine
COPY results results
COPY harness harness
RUN .venv/bin/python -m pip install --no-cache-dir ".[${EXTRAS}]"

ENV PATH="/prfaas-bench/.venv/bin:${PATH}"
VOLUME /prfaas-bench/runs
ENTRYPOINT ["prfaas"]
CMD ["run", "bench"]
