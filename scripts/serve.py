# SPDX-License-Identifier: MIT
"""Serve a tiny hybrid model on this machine's CPU with our backend, until interrupted.

    nox -s serve -- deepseek_v4 --port 30000 --storage-dir /tmp/kv -- --enable-metrics

What it stores is kept: started again, it restores the prompts of the last time. Flags after a second `--` go
to the server and win over ours.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_cpu import launch
from sglang_cpu.tiny_models import WRITERS

from ucm.testing.cpu_deployment import CpuDeployment
from ucm.testing.sglang_selection import Selection

if TYPE_CHECKING:
    from types import FrameType

DIRECTORY = Path(__file__).resolve().parent.parent / "reports" / "serve"
MODELS = ("qwen3_5", "deepseek_v4")


def main(words: list[str]) -> int:
    """Serve until interrupted; return 1 if the server ended by itself."""
    own, server_flags = _split(words)
    arguments = _parser().parse_args(own)
    directory = DIRECTORY / arguments.model
    checkpoint, storage = directory / "model", arguments.storage_dir or directory / "storage"
    shutil.rmtree(checkpoint, ignore_errors=True)
    checkpoint.mkdir(parents=True)
    WRITERS[arguments.model](checkpoint, 0)
    storage.mkdir(parents=True, exist_ok=True)
    deployment = CpuDeployment(
        model=checkpoint,
        selection=Selection.PLUGIN,
        sglang=None,
        layout="page_first",
        chunk_tokens=-1,
        storage_roots=(storage.resolve(),),
        extra_flags=("--max-total-tokens", "8192", "--served-model-name", arguments.model, *server_flags),
    )
    port = arguments.port or launch.free_port()
    log, command = directory / "server.log", deployment.command(port)
    print(f"$ {shlex.join(command)}\nlog: {log}\nThe server starts, which takes about a minute.", flush=True)
    # So that the server ends when this is ended.
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with launch.running_command(command, log=log, port=port, env=deployment.environment()) as server:
            print(_instructions(server.url, directory, storage), flush=True)
            status = server.process.wait()
    except KeyboardInterrupt:
        print("\nended")
        return 0
    except launch.ServerFailedError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"the server ended with status {status}; see {log}", file=sys.stderr)
    return 1


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Return what is for this script, and what comes after `--` for the server."""
    if "--" not in words:
        return words, []
    end = words.index("--")
    return words[:end], words[end + 1 :]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nox -s serve --",
        usage="%(prog)s [model] [--port N] [--storage-dir DIR] [-- SERVER_FLAG ...]",
        description=(__doc__ or "").splitlines()[0],
        epilog="Flags after -- go to the server and win over ours.",
    )
    parser.add_argument("model", nargs="?", choices=MODELS, default=MODELS[0], help="default: %(default)s")
    parser.add_argument("--port", type=int, metavar="N", help="where to serve (default: a free port)")
    parser.add_argument(
        "--storage-dir",
        type=Path,
        metavar="DIR",
        help="where to store (default: below reports/serve)",
    )
    return parser


def _instructions(url: str, directory: Path, storage: Path) -> str:
    """Return lines to paste."""
    prompt = '{"input_ids": [\'$(seq -s, 1 400)\'], "sampling_params": {"max_new_tokens": 8}}'
    validate = [
        *(str(Path(sys.executable).with_name("ucm-sglang")), "validate", "--url", url),
        *("--report", str(directory / "report.json")),
    ]
    return f"""
Serving {url}, storing in {storage}. Ctrl-C ends it.

Send a prompt of 400 tokens; the second time, the reply counts cached_tokens:
  curl -s {url}/generate -H 'Content-Type: application/json' -d '{prompt}'
Drop what is in memory, so that the next time it comes from disk:
  curl -s -X POST {url}/flush_cache
Check the hit rates of every tier:
  {shlex.join(validate)}
"""


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
