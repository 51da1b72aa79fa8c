"""The peers' virtual environments: made with pip from pinned requirements, and checked for them."""

import json
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
DEFAULT_FOLDER = Path.home() / ".cache" / "impala_async" / "peers"
# A runner inside has to find its pinned packages; this one may have others.
VERSIONS = """
import importlib.metadata, json
print(json.dumps({each.name: each.version for each in importlib.metadata.distributions()}))
"""


def requirements_of(venv: str) -> Path:
    return HERE / f"requirements_{venv}.txt"


def python_of(folder: Path, venv: str) -> Path:
    return folder / venv / "bin" / "python"


def pins_of(venv: str) -> dict[str, str]:
    """Versions by package name, extras left out."""
    lines = requirements_of(venv).read_text().split()
    halves = (re.sub(r"\[.*?\]", "", line).partition("==") for line in lines)
    return {_normal(name): version for name, _, version in halves}


def fault_of(folder: Path, venv: str) -> str | None:
    """Why this environment cannot be measured; None when it has what is pinned."""
    python = python_of(folder, venv)
    if not python.exists():
        return f"{folder / venv} is not installed; --install makes it"
    asked = subprocess.run([python, "-c", VERSIONS], capture_output=True, text=True, check=True)
    installed = {_normal(name): version for name, version in json.loads(asked.stdout).items()}
    for name, pinned in pins_of(venv).items():
        # 2.13.0+cpu is torch's 2.13.0 without CUDA.
        found = installed.get(name, "none").partition("+")[0]
        if found != pinned:
            return f"{folder / venv} has {name} {found} and should have {pinned}"
    return None


def install(folder: Path, venv: str) -> None:
    """Make it, or bring it to what is pinned. Which packages it takes pip's configuration says."""
    subprocess.run([sys.executable, "-m", "venv", folder / venv], check=True)
    subprocess.run(
        [python_of(folder, venv), "-m", "pip", "install", "-q", "-r", requirements_of(venv)],
        check=True,
        stdout=sys.stderr,
    )


def _normal(name: str) -> str:
    """A distribution may spell its own name with other marks than its requirement does."""
    return re.sub(r"[-_.]+", "-", name).lower()
