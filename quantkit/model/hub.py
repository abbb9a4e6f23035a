"""Uploads to the Hugging Face Hub, through its own client."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quantkit.errors import InputError
from quantkit.model.load import hub_is_reachable


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
