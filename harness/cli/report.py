"""`prfaas report`: one offline HTML page, and PNGs, of one or more runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from harness.cli.numbers import finite
from harness.errors import BadInput, ExitCode
from harness.places import check_file, make_folder

if TYPE_CHECKING:
    from harness.experiment import Experiment
    from results.report.data import Curve, Extras
    from results.summary import RunSummary

_EXAMPLES = """\
examples:
  prfaas report runs/bench-20260501T120000Z              writes report.html into the run
  prfaas report EMULATED SIMULATED --out both.html       two runs on one page
  prfaas report RUN --price-remote 24 --price-local 9 --price-gb 0.02 --currency USD

Without prices, cost is relative: a local instance-hour is 1, a remote one 2.0 (what the paper's
equal-cost clause implies), traffic is free.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EXAMPLES
    parser.add_argument("run_dirs", nargs="+", type=Path, metavar="RUN", help="run directories")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: RUN/report.html")
    parser.add_argument("--png", type=Path, metavar="DIR",
                        help="where PNGs go (default: RUN/charts)")  # fmt: skip
    parser.add_argument("--no-png", action="store_true", help="only the page")
    parser.add_argument(
        "--price-remote", type=finite(0), default=2.0, help="per remote instance-hour"
    )
    parser.add_argument(
        "--price-local", type=finite(0), default=1.0, help="per local instance-hour"
    )
    parser.add_argument(
        "--price-gb", type=finite(0), default=0.0, help="per GB that crosses the link"
    )
    parser.add_argument("--currency", default="", help="what prices are in")


def run(options: argparse.Namespace) -> int:
    from results.report import data, page
    from results.whole import write_whole

    if options.out is not None:
        check_file("--out", options.out)
    runs = [data.load(path, _extras(path, options)) for path in options.run_dirs]
    if options.png is not None and not options.no_png:
        make_folder("--png", options.png)
    drawn = [page.draw(each, f"r{at}") for at, each in enumerate(runs)]
    out = options.out or options.run_dirs[0] / "report.html"
    write_whole(out, page.page(runs, drawn))
    print(f"wrote {out} ({out.stat().st_size / 1e6:.2f} MB)")
    if not options.no_png:
        for each in runs:
            directory = options.png or each.path / "charts"
            if options.png and len(runs) > 1:
                directory = options.png / each.path.name
            written = page.write_pngs(each, directory)
            print(f"wrote {len(written)} PNGs to {directory}")
    return ExitCode.OK


def _extras(path: Path, options: argparse.Namespace) -> Extras:
    """The model's curves and costs, where the run's experiment can still be read."""
    from harness.experiment import load_experiment
    from results import summary
    from results.report.data import Extras

    found = summary.read(path)
    file = path / "experiment.toml"
    curve = None
    if file.exists():
        try:
            experiment = load_experiment(str(file))
        except BadInput as error:
            print(f"no model curves: {error}")
        else:
            curve = _curve(experiment)
    return Extras(curve, _costs(found, options), options.currency)


def _curve(experiment: Experiment) -> Curve | None:
    """Fig 5 for the configuration with a threshold, by the `work` reading."""
    import numpy as np

    from harness.planner.experiment import deployment_of, shape_of
    from harness.planner.model import Reading, Shape, Split
    from harness.planner.search import threshold_curves
    from results.report.data import Curve

    for each in experiment.configurations:
        if shape_of(each.policy) is not Shape.THRESHOLD or not (each.n_prfaas and each.n_prefill):
            continue
        deployment = deployment_of(experiment)
        longest = deployment.lengths.quantile(0.95)
        thresholds = np.linspace(0.02, 1.0, 60) * longest
        split = Split(each.n_prfaas, each.n_prefill, each.n_decode)
        points = threshold_curves(deployment, split, thresholds.tolist(), Reading.WORK)
        return Curve(
            tuple(point.threshold_tokens for point in points),
            tuple(point.prfaas_per_s for point in points),
            tuple(point.prefill_per_s for point in points),
            tuple(point.decode_per_s for point in points),
        )
    return None


def _costs(found: RunSummary, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Cost of 1,000 requests at the measured capacity, with the measured egress."""
    from harness.planner.cost import Operation, Prices, cost_per_request

    prices = Prices(options.price_remote, options.price_local, options.price_gb)
    costs: dict[str, dict[str, float]] = {}
    for each in found.configurations:
        rate = each.capacity.paper
        if not rate:
            continue
        phase = each.phase(found.capacity_phase)
        gbps = phase.egress.mean_gbps.paper if phase else None
        local = (each.n_p or 0) + (each.n_d or 0)
        work = Operation(each.n_prfaas or 0, local, rate, (gbps or 0.0) / 8 / rate)
        value = cost_per_request(work, prices)
        if value is not None:
            costs[each.name] = {"per 1,000 requests": 1000 * value}
    return costs
