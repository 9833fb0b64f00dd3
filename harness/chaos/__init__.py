"""A deterministic fault campaign: the real control plane, workers and transport, in virtual time.

`campaign.run_plan` runs one plan (`faults.draw` makes it from a seed); `invariants` says what must
hold; `shrink` makes a failing plan small; `planted` breaks the code on purpose, to see that it is
noticed.
"""
