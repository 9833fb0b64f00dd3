"""Moves KV caches between instances over TCP: whole and verified, or not at all.

Sans-I/O core: `frames` (wire format), `messages` (control bodies), `sender` and `receiver` (the two
ends of the protocol, time passed in). Around it: `plane` (a process that does the byte moving),
`lanes` (its threads), `client` (asyncio API in the worker process), `arena` (shared memory),
`monitor` (TCP_INFO and the verdict per link), `security` (TLS, authorisation, audit). Nothing here
imports torch.
"""
