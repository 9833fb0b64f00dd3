"""Device profiles: what one instance does with one model, as data with provenance."""

from harness.profiles.loading import load_profile, profile_paths
from harness.profiles.profile import DecodeStep, Origin, Profile, ProfileError, Provenance

__all__ = [
    "DecodeStep",
    "Origin",
    "Profile",
    "ProfileError",
    "Provenance",
    "load_profile",
    "profile_paths",
]
