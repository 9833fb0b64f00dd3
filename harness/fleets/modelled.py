"""The fleet of `simulate`: modelled instances and a fluid link on the virtual loop."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from engine.cache.checkpoints import CheckpointPolicy
from engine.disciplines import make_discipline
from harness.directory import PrefixDirectory
from harness.experiment import CacheSpec, ConfigurationSpec, Experiment
from harness.instances.modelled import DecodeRules, ModelledInstance
from harness.instances.modelled_batch import StepTimes
from harness.instances.modelled_prefill import PrefillRules
from harness.instances.prefix_pool import PrefixPool
from harness.links.copying import fluid_copy
from harness.links.fluid import FlowLimits, FluidLink, LinkState
from harness.links.shape import GOODPUT_SHARE, Shape
from harness.links.spec import LinkSpec
from harness.ports import InstanceSpec
from harness.prefixes import PoolKeeper
from harness.profiles import load_profile
from harness.profiles.profile import Profile
from harness.router import PrefixCopy
from harness.scale import UNSCALED, Scale
from harness.stalls import Timeout
from harness.topology import PD, PRFAAS, build_view, instance_specs
from harness.view import View
from results.rows import AuditRow


class ModelledFleet:
    """Implements harness.fleets.Fleet. Nothing is scaled: loop seconds are modelled seconds."""

    scale: Scale = UNSCALED
    patience_s = 0.0

    def __init__(
        self,
        instances: Mapping[str, ModelledInstance],
        links: Mapping[tuple[str, str], FluidLink],
        view: View,
        prefixes: PoolKeeper | None = None,
        discipline: str = "fifo",
    ) -> None:
        self.instances = instances
        self.links = links
        self.view = view
        self.verify = None
        self.prefixes = prefixes
        self.copier = self._copy_prefix
        self._discipline = discipline

    def facts(self) -> dict[str, Any]:
        return {
            "clock": "virtual",
            "instances": "modelled",
            "link": "fluid",
            "queue_discipline": self._discipline,
        }

    async def _copy_prefix(self, copy: PrefixCopy) -> int:
        """Raises TransferFailed."""
        await fluid_copy(self.links[copy.source, copy.sink.spec.cluster], copy.n_bytes)
        return round(copy.n_bytes)

    @property
    def timeout(self) -> Timeout:
        return asyncio.timeout

    async def audit(self) -> list[AuditRow]:
        return []

    async def close(self) -> None:
        """Nothing was started that outlives the loop."""


async def open_modelled(
    experiment: Experiment,
    configuration: ConfigurationSpec,
    limits: FlowLimits = FlowLimits(),
    max_batch: int | None = None,
) -> ModelledFleet:
    """The fleet of a configuration, on the running loop. `limits` bound each flow of its link,
    `max_batch` sequences its decode batches instead of the profile's."""
    local = load_profile(experiment.profiles.pd)
    profiles = {
        PRFAAS: load_profile(experiment.profiles.prfaas),
        PD: local if max_batch is None else replace(local, max_batch=max_batch),
    }
    specs = instance_specs(experiment, configuration)
    links = fluid_links(experiment.link, experiment.measure.sample_s, limits)
    queue = configuration.queue
    discipline = make_discipline(queue.discipline, queue.ageing, experiment.slo.ttft_s)
    rules = PrefillRules(chunk_tokens=queue.chunk_tokens, discipline=discipline)
    return build_fleet(specs, profiles, links, rules, cache=experiment.cache)


def build_fleet(
    specs: list[InstanceSpec],
    profiles: Mapping[str, Profile],
    links: Mapping[tuple[str, str], FluidLink],
    prefill: PrefillRules = PrefillRules(),
    decode: DecodeRules = DecodeRules(),
    cache: CacheSpec | None = None,
) -> ModelledFleet:
    """A fleet of any size; `profiles` by cluster. An instance that dies is not usable in the view
    from that moment until it is back."""
    signals = {ends: link.signals for ends, link in links.items()}
    view = build_view(specs, profiles, signals)

    keeper = None if cache is None or not cache.enabled else _keeper(cache, specs, view)

    def serving(spec: InstanceSpec, usable: bool) -> None:
        view.set_lost(spec.name, not usable)

    steps = {
        cluster: StepTimes(profile, decode.context_bucket_tokens)
        for cluster, profile in profiles.items()
        if profile.max_batch > 0
    }
    instances = {
        spec.name: ModelledInstance(
            spec,
            profiles[spec.cluster],
            prefill,
            decode,
            on_serving=serving,
            prefixes=None if keeper is None else keeper.pools[spec.cluster],
            steps=steps.get(spec.cluster),
        )
        for spec in specs
    }
    return ModelledFleet(instances, links, view, keeper, prefill.discipline.name)


def _keeper(cache: CacheSpec, specs: list[InstanceSpec], view: View) -> PoolKeeper:
    """A prefix pool for each cluster, and a directory in the view that hears of their events."""
    directory = PrefixDirectory(cache.directory_entries)
    policy = CheckpointPolicy(cache.interval_blocks, cache.prompt_end, cache.junction)
    pools = {}
    for cluster in dict.fromkeys(spec.cluster for spec in specs):
        directory.add_cluster(cluster, [spec.name for spec in specs if spec.cluster == cluster])
        pools[cluster] = PrefixPool(
            partial(directory.event, cluster), cache.blocks, cache.states, policy
        )
    view.directory = directory
    view.copies = True
    return PoolKeeper(pools)


def fluid_links(
    spec: LinkSpec,
    sample_s: float = 1.0,
    limits: FlowLimits = FlowLimits(),
    rate_factor: float = 1.0,
) -> dict[tuple[str, str], FluidLink]:
    """Both directions of a link. Rates of a spec count Ethernet frames; a fluid's are payload.

    `rate_factor` multiplies the rate: a fleet of several case studies shares several links.
    """
    timeline = spec.timeline()
    directions = {
        (PRFAAS, PD): [timed.shape.forward for timed in timeline],
        (PD, PRFAAS): [timed.shape.reverse for timed in timeline],
    }
    return {
        (source, sink): FluidLink(
            source,
            sink,
            [
                _state(timed.at_s, shape, timed.shape.rtt_s, rate_factor)
                for timed, shape in zip(timeline, shapes, strict=True)
            ],
            limits=limits,
            queue_bytes=shapes[0].queue_bytes,
            sample_s=sample_s,
        )
        for (source, sink), shapes in directions.items()
    }


def _state(at_s: float, shape: Shape, rtt_s: float, rate_factor: float) -> LinkState:
    return LinkState(
        at_s=at_s,
        rate_bps=0.0 if shape.down else shape.rate_bps * GOODPUT_SHARE * rate_factor,
        delay_s=shape.delay_s,
        rtt_s=rtt_s,
        loss=shape.loss.mean,
    )
