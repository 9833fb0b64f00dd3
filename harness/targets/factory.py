"""From a target's settings to the target. Must be called on a running loop."""

from __future__ import annotations

from harness.targets.base import Kind, Target, TargetSpec
from harness.targets.in_process import InProcessTarget
from harness.targets.openai import OpenAiTarget
from harness.targets.pairs import SglangPair, VllmPair


def make_target(spec: TargetSpec) -> Target:
    """Raises BadInput for settings that do not go together."""
    match spec.kind:
        case Kind.VLLM_PAIR:
            return VllmPair(spec)
        case Kind.SGLANG_PAIR:
            return SglangPair(spec)
        case Kind.IN_PROCESS:
            return InProcessTarget(spec)
        case _:
            return OpenAiTarget(spec)
