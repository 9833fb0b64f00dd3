"""What is compared: experiments, topology, instances, links, policies, planner, clock, load, CLI.

Importing this package never imports torch: `plan` and `simulate` work without it.
"""
