"""From a target's settings to the target. Must be called on a running loop."""

from __future__ import annotations

from harness.targets.base import Target, TargetSpec


def make_target(spec: TargetSpec) -> Target:
    """Raises BadInput for settings that do not go together."""
    from harness.targets.openai import OpenAiTarget

    return OpenAiTarget(spec)
