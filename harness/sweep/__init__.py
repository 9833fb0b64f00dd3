"""Sweeps: many variations of an experiment, on all cores, into one dataset."""
