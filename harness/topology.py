"""Which instances a configuration has, and the empty view over them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from harness.accounts import DecodePool, PrefillPool, WorkModel
from harness.experiment import ConfigurationSpec, Experiment
from harness.ports import InstanceSpec, LinkSignals, Role
from harness.view import View

#: The two clusters of the paper: remote compute-dense prefill, and local prefill and decode.
PRFAAS, PD = "prfaas", "pd"


def instance_specs(experiment: Experiment, configuration: ConfigurationSpec) -> list[InstanceSpec]:
    """Instances in a fixed order: remote prefill, local prefill, local decode."""
    profiles = experiment.profiles
    remote = [
        InstanceSpec(f"prfaas-{i}", PRFAAS, Role.PREFILL, profiles.prfaas)
        for i in range(configuration.n_prfaas)
    ]
    roles = [Role.PREFILL] * configuration.n_prefill + [Role.DECODE] * configuration.n_decode
    local = [InstanceSpec(f"pd-{i}", PD, role, profiles.pd) for i, role in enumerate(roles)]
    return remote + local


def build_view(
    specs: Iterable[InstanceSpec],
    work_models: Mapping[str, WorkModel],
    links: Mapping[tuple[str, str], LinkSignals],
) -> View:
    """Pools by cluster; `work_models` by cluster, in seconds of the running loop."""
    view = View(now_s=0.0, prefill={}, decode={}, links=dict(links))
    for spec in specs:
        if spec.role is Role.PREFILL:
            pool = view.prefill.get(spec.cluster)
            if pool is None:
                pool = view.prefill[spec.cluster] = PrefillPool(
                    spec.cluster, work_models[spec.cluster]
                )
            pool.add(spec.name)
        else:
            if spec.cluster not in view.decode:
                view.decode[spec.cluster] = DecodePool(spec.cluster)
            view.decode[spec.cluster].add(spec.name)
    return view
