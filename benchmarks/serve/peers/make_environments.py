"""Make a virtual environment for each peer in FOLDER, with the versions that its server script was written for.

    python benchmarks/serve/peers/make_environments.py FOLDER [PEER ...]

A complete environment is kept. Peers that cannot be installed are listed at the end with pip's last lines, and the exit code is
then 1.
"""

import argparse
import os
import subprocess
import sys
import venv
from pathlib import Path

# One onnxruntime for all, the version that stillroom is tested with, and one torch.
ONNXRUNTIME = "onnxruntime==1.31.1"
TORCH = "torch==2.13.0"
# What the peers' own documentation asks for. Each has its own environment, since their requirements conflict.
REQUIREMENTS = {
    # optimum-onnx pins transformers below 4.58. It runs the ONNX file inside transformers' own pipeline.
    "fastapi": ["fastapi==0.165.0", "uvicorn[standard]==0.54.0", "optimum-onnx==0.1.0", ONNXRUNTIME, TORCH],
    "litserve": ["litserve==0.2.19", ONNXRUNTIME, "tokenizers==0.23.3", "numpy"],
    "mosec": ["mosec==0.9.8", ONNXRUNTIME, "tokenizers==0.23.3", "numpy"],
    "bentoml": ["bentoml==1.4.39", ONNXRUNTIME, "tokenizers==0.23.3", "numpy"],
    # Its engine named optimum. infinity 0.0.78 needs numpy 1; the ONNX part of optimum is now in the package optimum-onnx.
    "infinity": ["infinity-emb[torch,server]==0.0.78", "optimum-onnx==0.1.0", ONNXRUNTIME, TORCH, "numpy<2"],
}
WHOLE = "installed.txt"  # the output of pip freeze, written last


def make(folder: Path, peer: str) -> str | None:
    """Makes the environment of `peer`; returns pip's last lines if that fails."""
    home = folder / peer
    if (home / WHOLE).is_file():
        return None
    venv.create(home, with_pip=True, clear=True)
    python = str(home / "bin" / "python")
    quiet = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    installed = subprocess.run(
        [python, "-m", "pip", "install", "--quiet", *REQUIREMENTS[peer]],
        env=quiet, stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    if installed.returncode:
        return "\n".join(installed.stderr.strip().splitlines()[-5:])
    frozen = subprocess.run([python, "-m", "pip", "freeze"], env=quiet, stdout=subprocess.PIPE, text=True, check=True)
    (home / WHOLE).write_text(frozen.stdout)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("peers", nargs="*", default=list(REQUIREMENTS), metavar="PEER", help=", ".join(REQUIREMENTS))
    given = parser.parse_args()
    if unknown := sorted(set(given.peers) - set(REQUIREMENTS)):
        parser.error(f"unknown peer: {', '.join(unknown)}; give some of {', '.join(REQUIREMENTS)}")
    failed = {}
    for peer in given.peers:
        print(f"{peer} ...", flush=True)
        if (reason := make(given.folder.resolve(), peer)) is not None:
            failed[peer] = reason
    for peer, reason in failed.items():
        print(f"{peer} could not be installed:\n{reason}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
