"""`prfaas certs`: a test certificate authority and one certificate per instance."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from engine.transport.certificates import make_authority, make_certificate
from harness.places import make_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = """examples:
  prfaas certs --out certs prefill-0 decode-0     an authority and two identities
  prfaas certs --out certs decode-1               one more, signed by the same authority

An identity is the certificate's common name; `engine.transport.security.Security` says which
tenants' caches it may send. For tests: private keys are written unencrypted, readable by their
owner only, and there is no revocation. Use your own authority in production.
"""
    parser.add_argument("names", nargs="+", help="identities, e.g. the instances' names")
    parser.add_argument("--out", type=Path, required=True, help="directory; made if missing")
    parser.add_argument("--days", type=int, default=30, help="validity (default 30)")
    parser.add_argument("--json", action="store_true", help="print the paths as JSON")


def run(options: argparse.Namespace) -> int:
    make_folder("--out", options.out)
    authority = make_authority(options.out, options.days)
    made = {name: make_certificate(options.out, name, options.days) for name in options.names}
    if options.json:
        paths = {name: {"certificate": str(c), "key": str(k)} for name, (c, k) in made.items()}
        print(json.dumps({"authority": str(authority), "identities": paths}))
        return 0
    print(f"authority  {authority}")
    for name, (certificate, key) in made.items():
        print(f"{name}  {certificate}  {key}")
    return 0
