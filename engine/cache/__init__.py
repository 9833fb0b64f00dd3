"""Block accounting of the hybrid cache (torch-free, shared with the simulator) and its storage."""
