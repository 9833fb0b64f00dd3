from harness.clock.handles import VirtualHandle as VirtualHandle
from harness.clock.timeline import Timeline as Timeline
