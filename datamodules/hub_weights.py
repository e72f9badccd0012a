"""Weights of transformers' codecs, from a folder, the local hub cache or the hub; refused where they are not whole."""

from __future__ import annotations

import hashlib
import os
import urllib.error
import urllib.request
from pathlib import Path
from pickle import PickleError  # raised by torch's own reader; nothing is unpickled here
from typing import Any

import torch

PROBE_SECONDS = 5.0


def load_model(name: str, weights: str) -> Any:
    """Load `EncodecModel` or `DacModel` from a folder, the local hub cache, or the hub.

    Raises:
        ValueError: weights that are absent, incomplete, damaged or out of reach.
    """
    from transformers import DacModel, EncodecModel

    kind: Any = EncodecModel if name == "encodec_24khz" else DacModel
    folder = Path(weights).expanduser()
    if folder.is_dir():
        return _from_pretrained(kind, str(folder), local=True)
    if os.sep in weights and (weights.startswith((".", os.sep, "~")) or weights.count("/") != 1):
        raise ValueError(f"weights={weights!r}: no such folder")
    try:
        return _from_pretrained(kind, weights, local=True)
    except ValueError:
        check_hub(weights)
    return _from_pretrained(kind, weights, local=False)


def check_hub(hub_id: str) -> None:
    """Fail at once where the hub is out of reach; transformers would retry for 23 s.

    Raises:
        ValueError: no network, or offline mode.
    """
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    hint = f"fetch {hub_id} where there is a network and give its folder as --weights"
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        raise ValueError(f"weights={hub_id!r}: not in the local cache, and HF_HUB_OFFLINE is set; {hint}")
    request = urllib.request.Request(f"{endpoint}/{hub_id}/resolve/main/config.json", method="HEAD")  # noqa: S310
    try:
        urllib.request.urlopen(request, timeout=PROBE_SECONDS).close()  # noqa: S310 - the user's own endpoint
    except urllib.error.HTTPError as error:
        if error.code in (401, 403, 404):
            reason = f"{endpoint} answers {error.code}: no such model, or not public"
            raise ValueError(f"weights={hub_id!r}: {reason}") from None
    except OSError as error:
        why = error.reason if isinstance(error, urllib.error.URLError) else error
        where = f"not in the local cache, and {endpoint} cannot be reached ({why})"
        raise ValueError(f"weights={hub_id!r}: {where}; {hint}") from None


def _from_pretrained(kind: Any, source: str, *, local: bool) -> Any:
    from safetensors import SafetensorError
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        model, info = kind.from_pretrained(source, local_files_only=local, output_loading_info=True)
    except (OSError, ValueError, KeyError, RuntimeError, EOFError, PickleError, SafetensorError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"weights={source!r}: no {kind.__name__} can be read there ({reason})") from None
    lacking = sorted(info["missing_keys"]) + sorted(str(key) for key in info.get("mismatched_keys", ()))
    if lacking:  # transformers would fill them with random numbers and only warn
        raise ValueError(
            f"weights={source!r}: {len(lacking)} of {kind.__name__}'s weights are missing or of another shape, first"
            f" {lacking[0]!r}"
        )
    return model


def weights_digest(model: torch.nn.Module) -> str:
    """SHA-256 over names and bytes of all weights, as hex."""
    whole = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        whole.update(name.encode())
        whole.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()
