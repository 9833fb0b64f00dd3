"""What computes: model, operators, cache pools, scheduler, KV transport, worker server."""
