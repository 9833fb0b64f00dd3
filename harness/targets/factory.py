"""From a target's settings to the target. Must be called on a running loop."""

from __future__ import annotations

from harness.load.alarm import Due
from harness.targets.base import Kind, Target, TargetSpec
from harness.targets.in_process import InProcessTarget
from harness.targets.openai import OpenAiTarget
from harness.targets.pairs import SglangPair, VllmPair


def make_target(spec: TargetSpec, due: Due | None = None) -> Target:
    """`due`: what goes before answers are read. Raises BadInput for settings that do not go
    together.
    """
    match spec.kind:
        case Kind.VLLM_PAIR:
            return VllmPair(spec, due)
        case Kind.SGLANG_PAIR:
            return SglangPair(spec, due)
        case Kind.IN_PROCESS:
            return InProcessTarget(spec)
        case _:
            return OpenAiTarget(spec, due)
