"""The Hugging Face Hub: whether it can be reached, and uploads through its own client."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from quantkit.errors import InputError


def upload(folder: Path, files: Sequence[str], repository: str, *, private: bool) -> str:
    """Make the repository if need be and put the files into one commit; its address."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError

    if constants.HF_HUB_OFFLINE or not hub_is_reachable(constants.ENDPOINT):
        raise InputError(
            f"the Hub ({constants.ENDPOINT}) is not reachable from here",
            where=repository,
            next_step=f"copy {folder} to a machine with a network, and push it from there",
        )
    try:
        api = HfApi()
        address = api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=address.repo_id,
            folder_path=folder,
            allow_patterns=list(files),
            commit_message="Quantized with quantkit",
        )
    except (HfHubHTTPError, ValueError, OSError) as error:
        raise InputError(
            f"the Hub did not take it: {' '.join(str(error).split())}",
            where=repository,
            allowed="OWNER/NAME, with a token that may write there",
            next_step="'hf auth login' keeps a token, or set HF_TOKEN",
        ) from error
    return str(address)


def hub_is_reachable(endpoint: str) -> bool:
    """Whether a connection can be opened; assumed behind a proxy."""
    address = urlsplit(endpoint)
    if getproxies().get(address.scheme):
        return True
    port = address.port or (443 if address.scheme == "https" else 80)
    try:
        with socket.create_connection((address.hostname or "", port), timeout=5):
            return True
    except OSError:
        return False
