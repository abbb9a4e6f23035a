"""Both ends of a protected model's connection: what `serve-host` prints, what `generate --host` says."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from quantkit.errors import InputError
from quantkit.private.files import CLIENT, HOST, kind_of, read_half
from quantkit.private.secret_files import make_token, read_token
from quantkit.runtime.generate import Sampling

LOOPBACK = ("127.0.0.1", "localhost")


@dataclass(frozen=True, kw_only=True, slots=True)
class Remote:
    """The host that a client is sent to."""

    url: str
    token_file: Path | None = None
    features: str = "float32"


def serve(
    *,
    folder: Path,
    listen: str,
    port: int,
    token_file: Path | None,
    most_clients: int,
    most_tokens: int | None,
    idle_seconds: float,
    message_mb: float,
    threads: int | None,
) -> None:
    """Serve until told to stop."""
    from quantkit.private.host import server as host_server
    from quantkit.private.host.model import open_host

    for flag, value, least in (
        ("--max-clients", most_clients, 1),
        ("--idle-timeout", idle_seconds, 0.1),
        ("--max-message-mb", message_mb, 0.001),
        ("--max-tokens", most_tokens or 1, 1),
        ("--threads", threads or 1, 1),
    ):
        if value < least:
            raise InputError(f"{value}", where=flag, allowed=f"{least} or more")
    if not 0 <= port <= 65535:
        raise InputError(f"{port}", where="--port", allowed="0 (any free one) to 65535")
    host = open_host(folder, threads=threads, most_sessions=most_clients, most_tokens=most_tokens)
    path = token_file or default_token_file(folder)
    token = read_token(path) if path.exists() else make_token(path)
    limits = host_server.Limits(message_bytes=int(message_mb * (1 << 20)), idle_seconds=idle_seconds)
    server = host_server.HostServer((listen, port), host, token, limits)

    def announce(address: str, bound: int) -> None:
        print(f"serving {folder} on http://{address}:{bound}; token in {path}; Ctrl-C ends it", flush=True)
        if listen not in LOOPBACK:
            print("quantkit: other machines can connect, and nothing is encrypted", file=sys.stderr)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        host_server.serve(server, announce)
    except KeyboardInterrupt:
        print("stopped")


def default_token_file(folder: Path) -> Path:
    """Where both sides look for a token that nobody named: beside their folders."""
    return folder.absolute().parent / "host.token"


def steps_from_host(
    folder: Path,
    remote: Remote,
    prompts: Sequence[Sequence[int]],
    *,
    threads: int | None,
    max_new_tokens: int,
    sampling: Sampling,
    stop_ids: frozenset[int],
) -> Iterator[list[int | None]]:
    """Tokens step by step, by a client here and a host there."""
    from quantkit.private.client.connection import connect, split_url
    from quantkit.private.client.model import generate_split, open_client

    split_url(remote.url)
    client = open_client(folder, threads=threads)
    path = remote.token_file or default_token_file(folder)
    if not path.exists():
        raise InputError(
            "no token to show the host",
            where=str(path),
            next_step="copy the host's, and name it with --token-file",
        )
    opener = partial(connect, remote.url, token=read_token(path), features=remote.features)
    return generate_split(
        client,
        opener,
        prompts,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        stop_ids=stop_ids,
    )


def require_side(folder: Path, *, is_half: bool) -> None:
    """Refuse half a model where a whole one is wanted, and the other way around."""
    if is_half:
        read_half(folder, CLIENT)
        return
    kind = kind_of(folder)
    if kind is not None:
        raise InputError(
            f"this is the {kind} side of a protected model and says nothing alone",
            where=str(folder),
            next_step=f"quantkit generate {folder.parent / CLIENT} --host URL, where 'quantkit serve-host "
            f"{folder.parent / HOST}' runs",
        )
