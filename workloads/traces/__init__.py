"""Readers of request traces, one module a format; `readers.open_trace` picks one."""
