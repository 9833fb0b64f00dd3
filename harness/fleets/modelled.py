"""The fleet of `simulate`: modelled instances and a fluid link on the virtual loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.experiment import ConfigurationSpec, Experiment
from harness.instances.modelled import DecodeRules, ModelledInstance
from harness.instances.modelled_prefill import PrefillRules
from harness.links.fluid import FlowLimits, FluidLink, LinkState
from harness.links.shape import GOODPUT_SHARE, Shape
from harness.links.spec import LinkSpec
from harness.ports import InstanceSpec, Role
from harness.profiles import load_profile
from harness.profiles.profile import Profile
from harness.scale import UNSCALED, Scale
from harness.topology import PD, PRFAAS, build_view, instance_specs
from harness.view import DecodePool, PrefillPool, View


class ModelledFleet:
    """Implements harness.fleets.Fleet. Nothing is scaled: loop seconds are modelled seconds."""

    scale: Scale = UNSCALED

    def __init__(
        self,
        instances: Mapping[str, ModelledInstance],
        links: Mapping[tuple[str, str], FluidLink],
        view: View,
    ) -> None:
        self.instances = instances
        self.links = links
        self.view = view
        self.verify = None

    def facts(self) -> dict[str, Any]:
        return {"clock": "virtual", "instances": "modelled", "link": "fluid"}

    async def close(self) -> None:
        """Nothing was started that outlives the loop."""


async def open_modelled(experiment: Experiment, configuration: ConfigurationSpec) -> ModelledFleet:
    """The fleet of a configuration, on the running loop."""
    profiles = {
        PRFAAS: load_profile(experiment.profiles.prfaas),
        PD: load_profile(experiment.profiles.pd),
    }
    specs = instance_specs(experiment, configuration)
    links = fluid_links(experiment.link, experiment.measure.sample_s)
    return build_fleet(specs, profiles, links)


def build_fleet(
    specs: list[InstanceSpec],
    profiles: Mapping[str, Profile],
    links: Mapping[tuple[str, str], FluidLink],
    prefill: PrefillRules = PrefillRules(),
    decode: DecodeRules = DecodeRules(),
) -> ModelledFleet:
    """A fleet of any size; `profiles` by cluster. An instance that dies is not usable in the view
    from that moment until it is back."""
    signals = {ends: link.signals for ends, link in links.items()}
    view = build_view(specs, profiles, signals)

    def serving(spec: InstanceSpec, usable: bool) -> None:
        pools: Mapping[str, PrefillPool | DecodePool]
        pools = view.prefill if spec.role is Role.PREFILL else view.decode
        pool = pools[spec.cluster]
        pool.set_usable(pool.names.index(spec.name), usable)

    instances = {
        spec.name: ModelledInstance(
            spec, profiles[spec.cluster], prefill, decode, on_serving=serving
        )
        for spec in specs
    }
    return ModelledFleet(instances, links, view)


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
