"""Builds the modules in C where there is a compiler; without one each has its twin in Python.

A module in C lies beside its twin, or what chooses between the two, and has the same name with an
underscore. All else about the package is in pyproject.toml.
"""

from hashlib import sha256
from pathlib import Path

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            ".".join(source.with_suffix("").parts),
            [str(source)],
            # A product that is rounded only with its sum would differ from the twin's.
            extra_compile_args=["-O3", "-ffp-contract=off"],
            # By which native knows a module that was built from another source.
            define_macros=[("SOURCE_SHA256", f'"{sha256(source.read_bytes()).hexdigest()}"')],
            # A failed build is a warning: what it would have built is faster, and nothing else.
            optional=True,
        )
        for package in ("engine", "harness", "results", "workloads")
        for source in sorted(Path(package).glob("**/_*.c"))
    ]
)
