"""cuDNN of this Python's environment, before any other of the machine's. Needs no torch."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Mapping
from pathlib import Path


def library_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables by which Transformer Engine finds the cuDNN that torch has brought; none where the user names one.

    Transformer Engine 2.20 looks on the machine first (`common/__init__.py`), and its library names cuDNN's parts without a
    folder. Where an image has another cuDNN, parts of two versions come together: it does not load, or does not find fused
    attention and silently takes one whose memory grows with the square of the length.
    """
    folder = Path(sysconfig.get_path("purelib")) / "nvidia" / "cudnn"
    if environment.get("CUDNN_HOME") or environment.get("CUDNN_PATH") or not folder.is_dir():
        return {}
    paths = environment.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    own = str(folder / "lib")
    return {
        "CUDNN_HOME": str(folder),
        "LD_LIBRARY_PATH": os.pathsep.join([own, *(one for one in paths if one not in ("", own))]),
    }
