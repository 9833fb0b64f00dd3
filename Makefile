# prfaas-bench. `make help` lists the targets; every one sets up what it needs.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# The exact version has a CPU build on the index used here; a range would bring a CUDA build of
# several GB. A machine with its own torch may set TORCH.
TORCH  ?= torch==2.13.0
IN_C   := $(shell find engine harness results workloads -name '_*.c')

.DEFAULT_GOAL := help
.PHONY: help install bench bench-paper bench-speed bench-capacity bench-engine bench-gpu bench-transport bench-load bench-peers bench-scale-out bench-recording bench-memory bench-nightly \
        plan ablate routing studies fidelity test test-netem test-kernels test-oracle test-ray test-peers chaos lint format clean

help:  ## list the targets
	@grep -hE '^[a-z][a-z-]*:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

$(STAMP): pyproject.toml setup.py $(IN_C)
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "prfaas-bench needs Python 3.11 or newer, found " + sys.version.split()[0])'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install --quiet '$(TORCH)'
	$(BIN)/python -m pip install --quiet --editable '.[engine,dev]'
	touch $@

install: $(STAMP)  ## create .venv and install everything

bench: $(STAMP)  ## the main job: four configurations on real bytes, about six minutes
	$(BIN)/prfaas run bench

bench-paper: $(STAMP)  ## the paper's case study at full scale, in virtual time
	$(BIN)/prfaas run paper --mode simulate

bench-speed: $(STAMP)  ## simulated requests per CPU-second, memory and growth
	$(BIN)/python benchmarks/speed.py

bench-capacity: $(STAMP)  ## simulated capacity against the throughput model, five seeds
	$(BIN)/python benchmarks/capacity.py

bench-engine: $(STAMP)  ## the engine's speed on this CPU, against what it replaces
	OMP_NUM_THREADS=1 $(BIN)/python -m engine.bench

bench-gpu: $(STAMP)  ## on a CUDA device: the engine's figures, the main job, a measured profile
	$(BIN)/python -m pip install --quiet --editable '.[gpu]'
	mkdir -p build
	$(BIN)/python -m engine.bench.gpu --out build/bench-gpu.json
	$(BIN)/prfaas run bench --name bench-gpu --set emulate.device=cuda
	$(BIN)/prfaas profile --device cuda --model kimi-linear-48b --lengths 1024,8192,32768 --out build/kimi-linear-48b.toml

bench-transport: $(STAMP)  ## the KV transport against raw sockets and iperf3
	$(BIN)/prfaas transport bench --tls

bench-load: $(STAMP)  ## the load generator's ceiling against a bundled stub server
	$(BIN)/python -m benchmarks.load

bench-peers: $(STAMP)  ## the load generator beside AIPerf and guidellm, each in its own environment
	$(BIN)/python -m benchmarks.peers_load

bench-scale-out: $(STAMP)  ## the comparison on a three-node Ray cluster here, and with a node removed
	$(BIN)/python -m pip install --quiet --editable '.[ray]'
	$(BIN)/python -m benchmarks.scale_out

bench-recording: $(STAMP)  ## the share of a simulated run's CPU time that recording takes
	$(BIN)/python benchmarks/recording.py

bench-memory: $(STAMP)  ## what prompts of mixed length leave in the memory of a worker
	$(BIN)/python benchmarks/memory.py

bench-nightly: $(STAMP)  ## the nightly suite: measured, judged, added to the history
	$(BIN)/prfaas nightly

plan: $(STAMP)  ## the paper's tables beside ours
	$(BIN)/prfaas plan paper

ablate: $(STAMP)  ## what each part of the scheduler adds, on the paper's workload
	$(BIN)/prfaas ablate paper

routing: $(STAMP)  ## cost of a routing decision at 1,250 instances
	$(BIN)/python benchmarks/routing.py

studies: $(STAMP)  ## what the paper leaves open: distance, SLO, models, bursts, cost
	for study in rtt slo models bursts cost; do $(BIN)/prfaas sweep $$study || exit; done

fidelity: $(STAMP)  ## emulate against simulate, figure by figure
	$(BIN)/prfaas fidelity bench

test: $(STAMP)  ## the default test suite, under 8 minutes on two cores
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

test-netem: $(STAMP)  ## netem tests on a kernel that has it: the host's, or user-mode Linux
	tests/netem/run.sh

# Environments of their own, because with fla importable transformers dispatches to Triton and fails
# on a CPU. They see the packages of .venv (torch above all) through a path file.
PURELIB := -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])'
PACKAGES.kernels := triton fla-core==0.6.0 einops packaging
PACKAGES.oracle := 'transformers>=5.23'
.venv-%/.installed: $(STAMP)
	test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	$(BIN)/python $(PURELIB) > "$$(.venv-$*/bin/python $(PURELIB))/base.pth"
	.venv-$*/bin/python -m pip install --quiet $(PACKAGES.$*)
	touch $@

test-kernels: .venv-kernels/.installed  ## the CUDA path's kernels under Triton's interpreter
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 .venv-kernels/bin/python -m pytest tests/engine/test_kernels.py

test-oracle: .venv-oracle/.installed  ## the whole model against transformers' Kimi Linear
	OMP_NUM_THREADS=1 .venv-oracle/bin/python -m pytest tests/oracle

test-ray: $(STAMP)  ## a Ray cluster of three nodes on this machine
	$(BIN)/python -m pip install --quiet --editable '.[ray]'
	$(BIN)/python -m pytest -m ray tests/harness/test_ray.py

chaos: $(STAMP)  ## the fault campaign in virtual time: 200 seeds
	$(BIN)/prfaas chaos --seeds 200

test-peers: $(STAMP)  ## our load client against public servers, each in an environment of its own
	$(BIN)/python -m pytest -m peers tests/peers

lint: $(STAMP)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)  ## rewrite the sources in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the virtual environments, caches and built modules; results in runs/ stay
	rm -rf .venv* .pytest_cache .mypy_cache .ruff_cache *.egg-info build/lib.* build/temp.*
	find engine harness results workloads -name '_*.so' -delete
