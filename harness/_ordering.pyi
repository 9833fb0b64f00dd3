from harness.ordering import FewestFirst as FewestFirst
from harness.ordering import LeastFirst as LeastFirst
