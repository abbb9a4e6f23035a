"""`quantkit serve-host`: the host of a protected model, served over WebSocket."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.app import CheckFiles, app
from quantkit.errors import InputError

DEFAULT_PORT = 8377
LOOPBACK = ("127.0.0.1", "localhost")


@app.command("serve-host", short_help="Serve the blocks of a protected model to its clients.")
def serve_host(
    folder: Annotated[Path, typer.Argument(help="the folder 'host' that 'quantkit protect' wrote")],
    port: Annotated[int, typer.Option(help="0 is any free one")] = DEFAULT_PORT,
    listen: Annotated[str, typer.Option(help="the address to listen on; beyond this machine, tunnel it")] = (
        "127.0.0.1"
    ),
    token_file: Annotated[
        Path | None,
        typer.Option(help="the token of clients; made if absent  [default: host.token beside it]"),
    ] = None,
    max_clients: Annotated[int, typer.Option(help="caches at once")] = 16,
    max_tokens: Annotated[
        int | None, typer.Option(help="of one client  [default: the context, 4096 at most]")
    ] = None,
    idle_timeout: Annotated[float, typer.Option(help="seconds until a silent client is dropped")] = 300.0,
    max_message_mb: Annotated[float, typer.Option(help="the largest message")] = 64.0,
    threads: Annotated[int | None, typer.Option(help="threads  [default: all cores]")] = None,
    check: CheckFiles = "quick",
) -> None:
    """Serve the blocks of a protected model to its clients."""
    from quantkit.private.files import default_token_file
    from quantkit.private.host import server as host_server
    from quantkit.private.host.model import open_host
    from quantkit.private.keys import make_token, read_token

    for flag, value, least in (
        ("--max-clients", max_clients, 1),
        ("--idle-timeout", idle_timeout, 0.1),
        ("--max-message-mb", max_message_mb, 0.001),
        ("--max-tokens", max_tokens or 1, 1),
        ("--threads", threads or 1, 1),
    ):
        if value < least:
            raise InputError(f"{value}", where=flag, allowed=f"{least} or more")
    if not 0 <= port <= 65535:
        raise InputError(f"{port}", where="--port", allowed="0 (any free one) to 65535")
    host = open_host(folder, threads=threads, max_sessions=max_clients, max_tokens=max_tokens, check=check)
    path = token_file or default_token_file(folder)
    token = read_token(path) if path.exists() else make_token(path)
    limits = host_server.Limits(message_bytes=int(max_message_mb * (1 << 20)), idle_seconds=idle_timeout)
    server = host_server.listen((listen, port), host, token, limits)

    def announce(address: str, bound: int) -> None:
        print(f"serving {folder} on http://{address}:{bound}; token in {path}; Ctrl-C ends it", flush=True)
        if listen not in LOOPBACK:
            print("quantkit: other machines can connect, and nothing is encrypted", file=sys.stderr)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        host_server.serve(server, announce)
    except KeyboardInterrupt:
        print("stopped")
