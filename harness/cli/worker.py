"""`prfaas worker`: one serving instance."""

from __future__ import annotations

import argparse

from engine.worker import options as worker_options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    worker_options.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    settings = worker_options.from_namespace(options)
    from engine.worker.process import serve

    return serve(settings)
