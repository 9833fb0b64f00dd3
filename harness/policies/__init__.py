"""Routing policies: pure, synchronous rules from a request and a view to a decision."""

from harness.policies.base import Decision, NoRoute, Policy

__all__ = ["Decision", "NoRoute", "Policy"]
