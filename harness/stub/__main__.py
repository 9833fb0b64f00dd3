"""`python -m harness.stub`: serve until interrupted; the first line of output is the URL."""

from __future__ import annotations

import argparse
import asyncio
import signal

from harness.load.limits import raise_open_files
from harness.realtime import run
from harness.stub.options import StubOptions
from harness.stub.server import serve


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m harness.stub", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 (default) takes a free one")
    parser.add_argument("--ttft-ms", type=float, default=0.0)
    parser.add_argument("--itl-ms", type=float, default=0.0)
    parser.add_argument("--tokens-per-chunk", type=int, default=1)
    parser.add_argument("--service", type=int, default=0, help="requests served at once; 0: all")
    parser.add_argument("--refuse-share", type=float, default=0.0, help="answered 503")
    parser.add_argument("--model", default="stub")
    parser.add_argument("--api-key", default="", help="refuse requests without it")
    options = parser.parse_args()
    raise_open_files()
    stub = StubOptions(
        options.ttft_ms / 1e3,
        options.itl_ms / 1e3,
        options.tokens_per_chunk,
        options.service,
        options.refuse_share,
        options.model,
        options.api_key,
    )

    async def main() -> None:
        server = await serve(stub, options.host, options.port)
        host, port = server.sockets[0].getsockname()[:2]
        print(f"http://{host}:{port}", flush=True)
        ended = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, ended.set)
        await ended.wait()
        server.close()

    run(main())


if __name__ == "__main__":
    main()
