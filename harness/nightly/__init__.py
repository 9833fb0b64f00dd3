"""The nightly: a suite of benchmarks, baseline and candidate in turn, judged and kept."""
