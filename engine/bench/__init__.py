"""Speed of the engine: `python -m engine.bench` on a CPU, `python -m engine.bench.gpu` on CUDA."""
