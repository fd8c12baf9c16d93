"""How benchmarks write what they measured: docs/_data/NAME.json, with device, versions and date."""

import datetime
import json
import os
import platform
from pathlib import Path

import torch

DATA = Path(__file__).resolve().parent.parent / "docs" / "_data"


def write(name: str, device: str, **figures) -> None:
    record = {
        "device": torch.cuda.get_device_name() if device == "cuda" else f"CPU, {os.cpu_count()} cores",
        "torch": torch.__version__.split("+")[0],
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        **figures,
    }
    text = json.dumps(record, indent=1)
    (DATA / f"{name}.json").write_text(text + "\n")
    print(f"docs/_data/{name}.json: {text}")
