"""The throughput model, the search for threshold and split, and estimates of TTFT."""

from harness.planner.experiment import (
    arrival_cv,
    deployment_of,
    plan_configuration,
    shape_of,
)
from harness.planner.link import LinkModel
from harness.planner.model import (
    Capacity,
    Deployment,
    Reading,
    Shape,
    Split,
    Stage,
    capacity,
    decode_batch,
    tpot_s,
)
from harness.planner.queueing import erlang_c, highest_rate, loaded_ttft
from harness.planner.search import (
    CurvePoint,
    SplitPoint,
    best_capacity,
    best_threshold,
    search,
    threshold_curves,
    threshold_grid,
)
from harness.planner.ttft import Ttft, unloaded_ttft

__all__ = [
    "Capacity",
    "CurvePoint",
    "Deployment",
    "LinkModel",
    "Reading",
    "Shape",
    "Split",
    "SplitPoint",
    "Stage",
    "Ttft",
    "arrival_cv",
    "best_capacity",
    "best_threshold",
    "capacity",
    "decode_batch",
    "deployment_of",
    "erlang_c",
    "highest_rate",
    "loaded_ttft",
    "plan_configuration",
    "search",
    "shape_of",
    "threshold_curves",
    "threshold_grid",
    "tpot_s",
    "unloaded_ttft",
]
