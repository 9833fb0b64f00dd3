"""One serving instance as a process: engine loop, KV hand-over, control API, OpenAI-compatible API.

`options` (torch-free) reads the command line, `process` is the entry point, `nursery` forks workers
quickly from one process that has torch loaded.
"""
