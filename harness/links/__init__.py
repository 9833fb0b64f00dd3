"""The link between two clusters: one specification, four backends, measured counters.

`spec` (what a user writes), `shape` (one direction's state, resolved), `factory` (chooses a
backend and opens it), `base` (the interface the harness uses), `netem`, `tbf`, `tun`, `relay`.
Importing this package imports none of them.
"""
