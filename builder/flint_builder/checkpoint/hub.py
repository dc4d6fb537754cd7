"""Fetching a checkpoint from the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from flint_runtime.errors import CheckpointError, ResourceError, foreign_error

_SMALL_FILES = ["*.json", "*.jinja"]


def fetch_repository(name: str, weights: Literal["auto", "nvfp4", "bf16"]) -> Path:
    """Download the wanted files of the repository "org/name" into the hub's cache and return their directory.

    "auto" fetches safetensors only where the repository has no GGUF file.

    Raises:
        CheckpointError: offline and not in the cache, or no such repository, or no access to it.
        ResourceError: the cache's disk is full.
    """
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    def download(*patterns: str) -> Path:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=[*_SMALL_FILES, *patterns]))

    try:
        directory = download("*.safetensors" if weights == "bf16" else "*.gguf")
        if weights == "auto" and not any(directory.glob("*.gguf")):
            directory = download("*.safetensors")
    except GatedRepoError:
        problem = "access to the repository is restricted; ask for access on its page and log in (hf auth login)"
    except RepositoryNotFoundError:
        problem = "the hub has no such repository, or it is private and you are not logged in (hf auth login)"
    except MemoryError:
        raise
    except Exception as error:  # the client lets its HTTP library's errors through
        found = foreign_error(error, f"{name} cannot be downloaded", CheckpointError, "")
        if isinstance(found, ResourceError):  # the disk with the cache is full
            raise found from error
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        problem = (
            f"it cannot be downloaded and is not complete in the local cache ({first_line}); check the connection, "
            "or download it elsewhere and pass its directory"
        )
    else:
        return directory
    raise CheckpointError(f"{name} is no local path and was taken for a Hugging Face repository: {problem}.")
